"""The gate of a memory server: a process that lends a pool to workers of other hosts, and speaks for them here."""
