"""Grammars that texts are held to, by llguidance: what may follow a token, worked out beside the steps."""
