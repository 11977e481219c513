"""Forms that a text is held to: schemas and other forms as grammars, and their compilation."""
