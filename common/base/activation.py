"""Functions of the gate of an MLP. Needs no torch."""

from enum import StrEnum


class Activation(StrEnum):
    """A function of the gate, by its name in config.json."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"  # GELU, approximated by a hyperbolic tangent
