"""What the three programs share, in rooms; ARCHITECTURE.md says which room may import which.

This file re-exports nothing, so that importing a torch-free module never pulls in torch.
"""
