"""A cache of transformers that keeps keys and values as Baton does with `kv.dtype = fp8`."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache


class RoundedCache(DynamicCache):  # type: ignore[misc]
    """Keeps keys and values as e4m3 numbers.

    Args:
        scales: of keys and of values, by layer; 1 without.
    """

    def __init__(self, *args: Any, scales: Sequence[tuple[float, float]] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scales = scales

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        pair = self.scales[layer_idx] if self.scales else (1.0, 1.0)
        rounded = (
            (each * (1.0 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn).to(each) * scale
            for each, scale in zip((key_states, value_states), pair, strict=True)
        )
        return super().update(*rounded, layer_idx, *args, **kwargs)
