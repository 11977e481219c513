"""The keys of a text's blocks, by which the router knows what of it lies where.

They are those that workers seal blocks under (`common/wire/block_key.py`), cut to eight bytes, as numbers: nothing is
read by them, so that two that are equal by chance cost no more than a wrong guess. Where they are compared with one
another only, each stands for several blocks: that takes a few microseconds where those of blocks take a hundred.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from common.wire.block_key import digests, root_of, short_keys
from common.wire.kv_layout import KVLayout
from common.wire.packing import pack_ids

SPAN_TOKENS = 256
"""What a key that is compared with the router's own only stands for, or a block, if that is more."""


@dataclass(slots=True, eq=False)
class TextKeys:
    """Of the full blocks of a text in one layout, or of so many together, as far as they are made."""

    layout: KVLayout
    digest: bytes  # of the last of these blocks, or where the chain begins
    keys: "array[int]"  # [num_blocks / span]
    span: int = 1  # blocks that a key stands for

    @classmethod
    def of(cls, layout: KVLayout, salt: bytes, span: int = 1) -> Self:
        """Of an empty text; those of two salts have no block in common."""
        return cls(layout, root_of(layout, salt), array("Q"), span)

    @property
    def key_tokens(self) -> int:
        """That a key stands for."""
        return self.layout.groups[0].block_size * self.span

    @property
    def num_tokens(self) -> int:
        """Of these blocks."""
        return len(self.keys) * self.key_tokens

    def grow(self, token_ids: Sequence[int]) -> None:
        """Go on with the tokens behind these blocks."""
        self.extend(digests(self.digest, pack_ids(token_ids), self.key_tokens))

    def extend(self, made: Sequence[bytes]) -> None:
        """Go on with blocks of these digests."""
        if made:
            self.digest = made[-1]
            self.keys += short_keys(made)

    def grown(self, token_ids: Sequence[int]) -> Self:
        """The same as another: these stay what they are, as others may have them, too."""
        longer = replace(self, keys=self.keys[:])
        longer.grow(token_ids)
        return longer


def span_of(layout: KVLayout) -> int:
    """Blocks that a key stands for which is compared with the router's own only."""
    return max(1, SPAN_TOKENS // layout.groups[0].block_size)
