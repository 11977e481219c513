"""Ownership of a pool's blocks, and their lookup by key. Knows no sockets and no memory."""
