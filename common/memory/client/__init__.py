"""A worker's side of a memory server: connections, and leased blocks."""
