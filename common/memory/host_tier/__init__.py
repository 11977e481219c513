"""Host tier: sealed blocks in host memory, beyond the pool's room."""
