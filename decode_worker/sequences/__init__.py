"""Sequences and rows: decoding, waiting and pausing, and the sealing of full blocks."""
