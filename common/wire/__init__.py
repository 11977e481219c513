"""Messages between processes, their transport, and the names and values inside messages.

Torch-free, because the router imports the package.
"""
