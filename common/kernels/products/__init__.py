"""Products of tokens and weight matrices."""
