"""Caches of groups of layers."""

from typing import NamedTuple

from torch import Tensor


class GroupCache(NamedTuple):
    """Cache of a group of layers, and the query heads of each layer."""

    blocks: Tensor  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]; of states [.., 1, 1, rows, row]
    num_q_heads: int  # 0 for states

    @property
    def has_states(self) -> bool:
        return self.num_q_heads == 0
