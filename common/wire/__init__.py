"""What processes say to one another, how it travels, and by which names and values they know one another.

Torch-free: the router stands on it.
"""
