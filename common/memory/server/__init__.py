"""The memory server: a process that owns the memory of a device. Imports no torch."""
