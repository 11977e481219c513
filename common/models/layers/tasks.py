"""Work on zeros to warm up with, in the shapes that products take."""

from collections.abc import Callable

import torch
from torch import Tensor

from common.ops.base import Residual, Weight

Task = Callable[[], object]
"""Work on zeros whose result is thrown away."""


def stream(weight: Weight, num_tokens: int) -> Residual:
    """Return a residual stream of zeros that a product with `weight` takes."""
    return Residual(zeros(weight, num_tokens, weight.num_in))


def zeros(weight: Weight, num_tokens: int, width: int) -> Tensor:
    """Return activations of zeros on the device of `weight`: `[num_tokens, width]`."""
    return torch.zeros((num_tokens, width), dtype=weight.dtype, device=weight.data.device)
