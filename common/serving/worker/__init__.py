"""The life of a worker's process: start, choice of a GPU, waits, visits to other pools, drain and end."""
