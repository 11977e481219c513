"""Activations of gated MLPs, computed on tiles in fp32, in Triton and in Gluon."""

import triton
import triton.language as tl

from common.base.activation import SWIGLU_ALPHA, SWIGLU_LIMIT

LIMIT, ALPHA = tl.constexpr(SWIGLU_LIMIT), tl.constexpr(SWIGLU_ALPHA)


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """Return the function of gate and up that an `Activation` names."""
    if ACTIVATION == "clamped_swiglu":
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        out = (up + 1.0) * gate / (1.0 + tl.exp(gate * -ALPHA))
    elif ACTIVATION == "silu":
        out = gate / (1.0 + tl.exp(-gate)) * up
    else:  # GELU: 1 + tanh(z) is twice the sigmoid of 2 * z
        out = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up
    return out
