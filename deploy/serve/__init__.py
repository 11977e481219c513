"""`baton serve` and `baton demo`: from a model's name to running processes."""
