"""The captured step: its tensors, the changes of rows, shared prefixes, when to launch."""
