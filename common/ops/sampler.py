"""The choice of the next token, by kernel or by reference."""

import torch
from torch import Tensor

from common.ops import reference
from common.ops.base import SamplingTensors


class Sampler:
    """Samples up to `max_rows` rows of `vocab` logits; holds what the kernels need between them.

    Args:
        kernels_choice: "triton", which needs a GPU, or "torch".
    """

    def __init__(self, kernels_choice: str, max_rows: int, vocab: int, device: torch.device) -> None:
        self._kernel = None
        if kernels_choice == "triton":
            # Imported here, so that a process on a CPU loads no triton.
            from common.kernels import sampling

            self._kernel = sampling.sample
            self._workspace = sampling.make_workspace(max_rows, vocab, device)

    def __call__(self, logits: Tensor, params: SamplingTensors, positions: Tensor) -> Tensor:
        """Token ids `[num_rows]` int32 for fp32 `logits [num_rows, vocab]` and `positions [num_rows]` int32."""
        if self._kernel is None:
            return reference.sample(logits, params, positions)
        return self._kernel(logits, params, positions, self._workspace)
