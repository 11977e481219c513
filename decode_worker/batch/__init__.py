"""The captured step: its tensors, changes of rows, shared prefixes, and launch times."""
