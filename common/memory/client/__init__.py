"""A worker's end: its connection to a memory server, and the blocks that it has from there."""
