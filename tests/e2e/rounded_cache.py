"""A cache of transformers that keeps keys and values as Baton does with `kv.dtype = fp8`."""

from typing import Any

import torch
from transformers import DynamicCache


class RoundedCache(DynamicCache):  # type: ignore[misc]
    """Keeps keys and values as e4m3 numbers."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rounded = (each.clamp(-448, 448).to(torch.float8_e4m3fn).to(each) for each in (key_states, value_states))
        return super().update(*rounded, *args, **kwargs)
