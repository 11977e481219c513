"""The process that owns the memory of one device; imports no torch."""
