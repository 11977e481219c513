"""Sequences and their rows: who decodes, who waits, who gives way, which blocks are full."""
