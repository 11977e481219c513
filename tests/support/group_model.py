"""A made-up model whose next token depends on all that its groups keep, and a device that keeps it in blocks.

What a block of a group holds is written there by the token at its place. A state remembers how many tokens it has seen:
read one token early or late, or after another sequence's, it is not the one that is wanted.
"""

from collections.abc import Sequence

from common.wire.values.kv_layout import KVGroup, KVLayout
from tests.support.layouts import full, latent, state, window

WINDOWED = KVLayout("model", (full(1, 1, 1, 4, "float32"), window(2, 7)))
HYBRID = KVLayout("model", (full(1, 1, 1, 4, "float32"), window(2, 7), state(3)))
LATENT = KVLayout("model", (latent(4, 3),))
STATES = KVLayout("model", (state(3), latent(3)))
LAYOUTS = {"windowed": WINDOWED, "hybrid": HYBRID, "latent": LATENT, "states": STATES}

Kept = tuple[object, ...]


def seen_by(group: KVGroup, token_ids: Sequence[int]) -> Kept:
    """What the last token sees of a group, itself included."""
    if not group.grows:
        return (len(token_ids), hash(tuple(token_ids)))
    return tuple(token_ids[-group.window :] if group.window else token_ids)


def next_token(layout: KVLayout, token_ids: Sequence[int]) -> int:
    """After a text."""
    return hash(tuple(seen_by(group, token_ids) for group in layout.groups)) % 1000


class GroupMemory:
    """Blocks of all groups, counted within each, as a device has them."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self.slots: dict[tuple[int, int, int], tuple[int, int]] = {}  # group, block, offset: position and token
        self.states: dict[tuple[int, int], tuple[int, ...]] = {}  # group, block: the tokens that it has seen

    def step(self, tables: Sequence[Sequence[int]], position: int, token: int) -> int:
        """Write a token at its position, in blocks by group and place, and return the one that follows."""
        pairs = enumerate(zip(self.layout.groups, tables, strict=True))
        seen = (self._token(number, group, table, position, token) for number, (group, table) in pairs)
        return hash(tuple(seen)) % 1000

    def copy(self, source: "GroupMemory", group: int, source_block: int, target_block: int) -> None:
        """A whole block."""
        if not self.layout.groups[group].grows:
            self.states[group, target_block] = source.states[group, source_block]
        for offset in range(self.layout.groups[group].block_size):
            if (group, source_block, offset) in source.slots:
                self.slots[group, target_block, offset] = source.slots[group, source_block, offset]

    def _token(self, number: int, group: KVGroup, table: Sequence[int], position: int, token: int) -> Kept:
        if not group.grows:
            before = self.states.get((number, table[0]), ()) if position else ()
            assert len(before) == position, "a state of another position, or of another sequence"
            self.states[number, table[0]] = (*before, token)
            return seen_by(group, self.states[number, table[0]])
        self.slots[number, table[position // group.block_size], position % group.block_size] = position, token
        first = max(0, position + 1 - group.window) if group.window else 0
        return tuple(self._read(number, group, table, each) for each in range(first, position + 1))

    def _read(self, number: int, group: KVGroup, table: Sequence[int], position: int) -> int:
        was, token = self.slots[number, table[position // group.block_size], position % group.block_size]
        assert was == position, "a block of another place, or of another sequence"
        return token
