"""Sizes of the parts of a decoder as data, and the weights that each part has. Needs no torch."""
