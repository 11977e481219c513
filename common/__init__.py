"""Code shared by the router, the workers and the memory server; ARCHITECTURE.md says which package may import which.

The package re-exports nothing, so importing a torch-free module never loads torch.
"""
