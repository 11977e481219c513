"""Connections to workers, memory servers and operators, and what they say."""
