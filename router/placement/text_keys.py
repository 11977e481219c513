"""Keys of a text's blocks, with which the router looks up cached prefixes.

Workers seal blocks under full keys (`common/wire/values/block_key.py`). The router cuts keys to eight bytes. No block
is read by a cut key, so two keys equal by chance only cause a wrong guess.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from common.wire.values.block_key import digests, root_of, short_keys
from common.wire.values.kv_layout import KVLayout
from common.wire.values.packing import pack_ids


@dataclass(slots=True, eq=False)
class TextKeys:
    """Keys of the full blocks of a text in a KV layout, as far as computed."""

    layout: KVLayout
    digest: bytes  # of the last block, or the root of the chain
    keys: "array[int]"  # [num_blocks]

    @classmethod
    def of(cls, layout: KVLayout, salt: bytes) -> Self:
        """Return the keys of an empty text; texts with different salts share no block."""
        return cls(layout, root_of(layout, salt), array("Q"))

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    @property
    def num_tokens(self) -> int:
        """Tokens in the blocks with keys."""
        return len(self.keys) * self.block_size

    def grow(self, token_ids: Sequence[int]) -> None:
        """Append the keys of the tokens after the last block."""
        self.extend(digests(self.digest, pack_ids(token_ids), self.block_size))

    def extend(self, made: Sequence[bytes]) -> None:
        """Append blocks with these digests."""
        if made:
            self.digest = made[-1]
            self.keys += short_keys(made)

    def grown(self, token_ids: Sequence[int]) -> Self:
        """Return a longer copy; the original stays unchanged, because several owners may share it."""
        longer = replace(self, keys=self.keys[:])
        longer.grow(token_ids)
        return longer
