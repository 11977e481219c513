"""The shape of KV blocks, as pure values; blocks move only between peers of equal shape.

Layers with a cache of equal kind and size are a **group**. Each group has its own block size. Each sequence has a block
table in each group: a row of **places**, each with a block, in the order of tokens.
"""

import json
from collections.abc import Sequence
from enum import IntEnum
from hashlib import sha256
from operator import mul
from typing import Annotated

from msgspec import Meta

from common.wire.values.fields import MAX_INT32, Count, Printable, WireStruct
from common.wire.values.packing import uneven

E4M3 = "float8_e4m3fn"
"""A byte of sign, 4 bits of exponent and 3 of mantissa, without infinities; the largest number is 448."""
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, E4M3: 1}
MAX_GROUPS = 8

Counts = tuple[int, ...]
"""Numbers of blocks, by group."""
STEP_DIVISOR = 4
"""Divisor of a pool's memory: most that is set aside for windows of a prompt step."""
MAX_BLOCKS = 1 << 22
"""Most blocks of a group."""
NumBlocks = Annotated[tuple[Annotated[int, Meta(ge=2, le=MAX_BLOCKS)], ...], Meta(min_length=1, max_length=MAX_GROUPS)]
"""Blocks of a pool by group for texts of usual length, proof blocks included."""
Floor = Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_BLOCKS)], ...], Meta(max_length=MAX_GROUPS)]
"""Blocks of a pool by group that the group can have at any time; () if no group lends memory to another."""
NumWanted = Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_BLOCKS)], ...], Meta(min_length=1, max_length=MAX_GROUPS)]
"""Blocks by group, without proof blocks."""
Extent = Annotated[int, Meta(ge=1, le=1 << 16)]


class CacheKind(IntEnum):
    """The content of a group's blocks."""

    FULL = 1
    """Keys and values of all tokens."""
    WINDOW = 2
    """Keys and values of the last tokens."""
    LATENT = 3
    """A vector per token; keys and values are computed from the vector."""
    STATE = 4
    """A single block at any length, rewritten by every token, so valid at a single position."""


class KVGroup(WireStruct):
    """Layers with equal caches. A block's memory is `[layer][k|v][token][kv_head][dim]`, contiguous over layers.

    LATENT and STATE have a single plane in place of `k|v`. A STATE has no tokens, so `block_size` is 1.
    """

    kind: CacheKind
    num_layers: Extent
    num_kv_heads: Extent
    head_dim: Extent
    block_size: Extent  # tokens per block
    window: Count  # tokens seen by a token, itself included; 0 unless `kind` is WINDOW
    dtype: Annotated[str, Meta(pattern=rf"\A({'|'.join(DTYPE_BYTES)})\Z")]
    scales: Annotated[str, Meta(pattern=r"\A([0-9a-f]{16})?\Z")] = ""  # `scales_digest` of its layers

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """`[layer, k|v, token, kv_head, dim]`."""
        num_planes = 2 if self.kind in (CacheKind.FULL, CacheKind.WINDOW) else 1
        return (self.num_layers, num_planes, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def logical(self) -> tuple[object, ...]:
        """All that determines the numbers in blocks, beside the model."""
        return (self.kind.name, self.window, self.dtype, *([self.scales] if self.scales else []))

    @property
    def token_bytes(self) -> int:
        """Bytes of a cached token; bytes of the whole state for STATE."""
        return self.block_bytes // self.block_size

    @property
    def block_bytes(self) -> int:
        layers, planes, tokens, heads, dims = self.block_shape
        return layers * planes * tokens * heads * dims * DTYPE_BYTES[self.dtype]

    @property
    def is_append_only(self) -> bool:
        """Tell whether a full block never changes while the sequence lives."""
        return self.kind in (CacheKind.FULL, CacheKind.LATENT)

    @property
    def grows(self) -> bool:
        """Tell whether a longer sequence may need more blocks."""
        return self.kind is not CacheKind.STATE

    def num_places(self, num_tokens: int) -> int:
        """Return the number of places taken by the first `num_tokens` tokens."""
        return 1 if self.kind is CacheKind.STATE else -(-num_tokens // self.block_size)

    def first_seen(self, num_tokens: int) -> int:
        """Return the first place seen by the last of `num_tokens` tokens; no token to come reads earlier places."""
        return max(0, num_tokens - self.window) // self.block_size if self.kind is CacheKind.WINDOW else 0

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Return the most blocks a sequence holds on its way to `num_tokens` tokens, by steps of `step_tokens`."""
        if self.kind is not CacheKind.WINDOW:
            return self.num_places(num_tokens)
        return min(self.num_places(num_tokens), self.num_places(self.window + step_tokens - 2) + 1)

    def most_tokens(self, num_blocks: int, step_tokens: int) -> int:
        """Return the length of the longest sequence for which `num_blocks` blocks suffice, in tokens."""
        if not self.grows or (self.window and num_blocks >= self.most_blocks(MAX_INT32, step_tokens)):
            return MAX_INT32 if num_blocks else 0
        return num_blocks * self.block_size


class KVLayout(WireStruct):
    """All groups of a model.

    `fingerprint` names the model and its weights, because KV of two models with equal geometry must not mix.
    """

    fingerprint: Annotated[str, Meta(min_length=1, max_length=64), Printable()]
    groups: Annotated[tuple[KVGroup, ...], Meta(min_length=1, max_length=MAX_GROUPS)]

    @property
    def logical(self) -> tuple[object, ...]:
        """All that determines the numbers in KV: the model, and each group's kind, window, dtype and scales."""
        return (self.fingerprint, *(group.logical for group in self.groups))

    @property
    def nothing(self) -> Counts:
        """Zero blocks of each group."""
        return (0,) * len(self.groups)

    def problem(self, num_blocks: Counts, floor: Counts = ()) -> str:
        """Require a width for windows only, a block size of 1 for states, and numbers of blocks for each group."""
        for number, group in enumerate(self.groups):
            if (group.kind is CacheKind.WINDOW) != (group.window > 0):
                return f"groups[{number}] is {group.kind.name} with a window of {group.window}"
            if group.kind is CacheKind.STATE and group.block_size != 1:
                return f"groups[{number}] is {group.kind.name} with a block_size of {group.block_size}"
        return uneven(len(self.groups), len(num_blocks), len(floor or num_blocks)) or excess(floor, num_blocks)

    @property
    def block_size(self) -> int:
        """Tokens of a block, in the first group that grows; 1 if none does."""
        return next((group.block_size for group in self.groups if group.grows), 1)

    @property
    def is_reusable(self) -> bool:
        """Tell whether texts with an equal prefix can share full blocks: one key must name a place in all groups."""
        sizes = {group.block_size for group in self.groups if group.grows}
        return len(sizes) == 1

    @property
    def is_append_only(self) -> bool:
        """Tell whether full blocks of all groups never change, so each full block ends a prefix that can be resumed."""
        return all(group.is_append_only for group in self.groups)

    @property
    def is_plain(self) -> bool:
        """Tell whether a full block of a text is a single block, so a text can be resumed behind any."""
        return len(self.groups) == 1 and self.is_append_only

    @property
    def main(self) -> int:
        """The first group that keeps all tokens, or the first of all; use of a pool is reported in its blocks."""
        return next((number for number, group in enumerate(self.groups) if group.is_append_only), 0)

    def in_main(self, counts: Counts) -> int:
        """Return the blocks of the main group that have the bytes of blocks of each group, rounded up."""
        sizes = [group.block_bytes for group in self.groups]
        num_bytes: int = sum(map(mul, counts, sizes))
        return -(-num_bytes // sizes[self.main])

    @property
    def states(self) -> list[int]:
        """Numbers of the groups of states."""
        return [number for number, group in enumerate(self.groups) if not group.grows]

    def differences(self, other: "KVLayout") -> list[str]:
        """Describe each field that differs from `other`; empty when blocks may be exchanged."""
        ours, theirs = self._fields(), other._fields()
        return [
            f"{name}: {ours.get(name, 'nothing')!r} here, {theirs.get(name, 'nothing')!r} there"
            for name in ours | theirs
            if ours.get(name) != theirs.get(name)
        ]

    def _fields(self) -> dict[str, object]:
        fields: dict[str, object] = {"fingerprint": self.fingerprint, "num_groups": len(self.groups)}
        for number, group in enumerate(self.groups):
            for name in group.__struct_fields__:
                value = getattr(group, name)
                fields[f"groups[{number}].{name}"] = value.name if isinstance(value, CacheKind) else value
        return fields

    def most_blocks(self, num_tokens: int, step_tokens: int) -> Counts:
        """Return `KVGroup.most_blocks` of each group."""
        return tuple(group.most_blocks(num_tokens, step_tokens) for group in self.groups)

    def most_tokens(self, num_blocks: Counts, step_tokens: int) -> int:
        """Return the smallest `KVGroup.most_tokens` of all groups."""
        pairs = zip(self.groups, num_blocks, strict=True)
        return min(group.most_tokens(count, step_tokens) for group, count in pairs)

    def divided(self, num_bytes: int, num_tokens: int, step_tokens: int = 0) -> Counts:
        """Divide `num_bytes` of memory into blocks of each group, in proportion to a sequence of `num_tokens`.

        Groups with windows have further blocks for a prompt step of `step_tokens`, as far as STEP_DIVISOR allows.
        """
        windows = [group for group in self.groups if group.kind is CacheKind.WINDOW]
        held_tokens = min(step_tokens, num_bytes // (STEP_DIVISOR * sum(group.token_bytes for group in windows) or 1))
        of_step = [group.num_places(held_tokens) if group in windows else 0 for group in self.groups]
        shares = self.most_blocks(num_tokens, 1)
        rest_bytes = num_bytes - self._bytes(of_step)
        return tuple(
            max(0, rest_bytes) * share // self._bytes(shares) + further
            for share, further in zip(shares, of_step, strict=True)
        )

    def _bytes(self, num_blocks: Sequence[int]) -> int:
        return sum(count * group.block_bytes for count, group in zip(num_blocks, self.groups, strict=True))


def scales_digest(scales: Sequence[tuple[float, float]]) -> str:
    """Return 16 hex digits that identify the scales of keys and values of a group's layers; "" if all are 1."""
    if all(scale == 1.0 for pair in scales for scale in pair):
        return ""
    return sha256(json.dumps([list(map(float.hex, pair)) for pair in scales]).encode()).hexdigest()[:16]


def excess(floor: Counts, num_blocks: Counts) -> str:
    """Require floors below the numbers of blocks, with proof blocks: say which is not."""
    for number, (least, count) in enumerate(zip(floor, num_blocks, strict=False)):
        if least >= count:
            return f"groups[{number}] has {count} blocks, with a floor of {least}"
    return ""
