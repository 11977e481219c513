"""Sealed blocks in host memory, for which the pool has no room."""
