"""Grammars for outputs, by llguidance: masks of allowed tokens are computed in other processes during the steps."""
