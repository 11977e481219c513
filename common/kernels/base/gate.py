"""Gate of a gated MLP: a function of the gate, times up. Named as in config.json."""

import triton
import triton.language as tl

SILU = "silu"
GELU_TANH = "gelu_pytorch_tanh"
CLAMPED_SWIGLU = "clamped_swiglu"
ACTIVATIONS = (SILU, GELU_TANH, CLAMPED_SWIGLU)
LIMIT, ALPHA = tl.constexpr(7.0), tl.constexpr(1.702)  # of the clamped SwiGLU of gpt-oss


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Return `activation(gate) * up` of fp32 numbers or tensors; with a clamped SwiGLU, up is increased by 1.

    Callable from Gluon.
    """
    turned = gate
    if ACTIVATION == "gelu_pytorch_tanh":  # (1 + tanh(x)) / 2 is sigmoid(2 * x)
        turned = gate * (
            1.5957691216057308 + 0.07135481627260025 * gate * gate
        )  # 2 * sqrt(2 / pi), 0.044715 times that
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        turned = gate * ALPHA
    return gate / (1.0 + tl.exp(-turned)) * up
