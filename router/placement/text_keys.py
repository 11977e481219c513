"""The keys of a text's blocks, by which the router knows what of it lies where.

Workers seal blocks under these keys (`common/wire/values/block_key.py`). Here they are cut to eight bytes, as numbers:
nothing is read by them, so two keys that are equal by chance cost no more than a wrong guess.
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
    """Of the full blocks of a text in one layout, as far as they are made."""

    layout: KVLayout
    digest: bytes  # of the last of these blocks, or where the chain begins
    keys: "array[int]"  # [num_blocks]

    @classmethod
    def of(cls, layout: KVLayout, salt: bytes) -> Self:
        """Of an empty text; those of two salts have no block in common."""
        return cls(layout, root_of(layout, salt), array("Q"))

    @property
    def block_size(self) -> int:
        return self.layout.groups[0].block_size

    @property
    def num_tokens(self) -> int:
        """Of these blocks."""
        return len(self.keys) * self.block_size

    def grow(self, token_ids: Sequence[int]) -> None:
        """Go on with the tokens behind these blocks."""
        self.extend(digests(self.digest, pack_ids(token_ids), self.block_size))

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
