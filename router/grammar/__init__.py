"""Grammars for constrained texts: schemas and other forms, and their compilation."""
