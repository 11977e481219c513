"""Functions of the gate of an MLP. Needs no torch."""

from enum import StrEnum

SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702


class Activation(StrEnum):
    """A function of gate and up, by its name in config.json if it has one there."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"  # GELU, approximated by a hyperbolic tangent
    CLAMPED_SWIGLU = "clamped_swiglu"  # (up + 1) * gate * sigmoid(ALPHA * gate), of gate <= LIMIT and |up| <= LIMIT
