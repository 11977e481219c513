"""The life of a worker's process: it starts, takes a GPU, waits, visits other pools, drains and ends."""
