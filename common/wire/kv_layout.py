"""The shape of one KV block: a pure value, equal in both peers or no block moves between them."""

from dataclasses import dataclass
from typing import Annotated

from common.wire.fields import Name, OneOf, Range

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

PROOF_BLOCK = 0
"""Of every pool, never allocated: in a prefill worker's or a memory server's it holds the pattern that proves the way
there, in a decode worker's own it receives that, however full the pool is."""

Extent = Annotated[int, Range(1, 1 << 16)]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Memory is `[block][layer][k|v][token][kv_head][dim]`: one block of all layers is contiguous.

    `fingerprint` names the model and its weights: two models of equal geometry must not mix.
    """

    fingerprint: Annotated[str, Name(1, 64)]
    num_layers: Extent
    num_kv_heads: Extent
    head_dim: Extent
    block_size: Extent  # tokens per block
    dtype: Annotated[str, OneOf(DTYPE_BYTES)]

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """`[layer, k|v, token, kv_head, dim]`."""
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def token_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def differences(self, other: "KVLayout") -> list[str]:
        """Each field that differs, as `field: ours, theirs`; empty when blocks may be exchanged."""
        return [
            f"{name}: {getattr(self, name)!r} here, {getattr(other, name)!r} there"
            for name in self.__dataclass_fields__
            if getattr(self, name) != getattr(other, name)
        ]
