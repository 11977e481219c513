"""Sizes of MXFP4, a format of weights: values of 4 bits, and a scale of 8 bits for some values. Needs no torch."""

GROUP = 32
"""Values with a scale in common, along a row."""
BITS = 4 + 8 / GROUP
"""Bits of a value and its part of a scale."""
