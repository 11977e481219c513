"""Which block of a pool is whose, and which can be found by a key. Knows no sockets and no memory."""
