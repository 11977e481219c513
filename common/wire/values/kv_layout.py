"""The shape of KV blocks: pure values, equal in both peers or no block moves between them.

What a model keeps of a sequence is of few kinds, and layers of one kind and size are a **group**. A group has blocks of
its own size, and of each sequence a table of its own: `places`, each a block, in the order of the tokens.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from common.wire.values.fields import MAX_INT32, Length, Name, OneOf, Range

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MAX_GROUPS = 8

ALIGNMENT_BYTES = 256
"""Of each group's memory in a pool."""
Counts = tuple[int, ...]
"""Blocks, by group."""
MAX_BLOCKS = 1 << 22
"""Of a group."""
NumBlocks = Annotated[tuple[Annotated[int, Range(2, MAX_BLOCKS)], ...], Length(1, MAX_GROUPS)]
"""Of a pool, by group, proof blocks included."""
NumWanted = Annotated[tuple[Annotated[int, Range(0, MAX_BLOCKS)], ...], Length(1, MAX_GROUPS)]
"""Of a pool, by group."""
Extent = Annotated[int, Range(1, 1 << 16)]


class CacheKind(IntEnum):
    """What a group keeps of a sequence."""

    FULL = 1
    """Keys and values of all its tokens."""
    WINDOW = 2
    """Keys and values of its last tokens."""
    LATENT = 3
    """One vector of each token, of which keys and values are made."""
    STATE = 4
    """One block however long it is, rewritten by every token: valid at one position only."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Memory of a block is `[layer][k|v][token][kv_head][dim]`: all layers of it are contiguous.

    A latent vector and a state have one plane in place of `k|v`, and a state no tokens: its `block_size` is 1.
    """

    kind: CacheKind
    num_layers: Extent
    num_kv_heads: Extent
    head_dim: Extent
    block_size: Extent  # tokens per block
    window: Annotated[int, Range(0, MAX_INT32)]  # tokens that a token sees, itself included; 0 unless it is a WINDOW
    dtype: Annotated[str, OneOf(DTYPE_BYTES)]

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """`[layer, k|v, token, kv_head, dim]`."""
        num_planes = 2 if self.kind in (CacheKind.FULL, CacheKind.WINDOW) else 1
        return (self.num_layers, num_planes, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Of a token that is kept; of a state, all of it."""
        return self.block_bytes // self.block_size

    @property
    def block_bytes(self) -> int:
        layers, planes, tokens, heads, dims = self.block_shape
        return layers * planes * tokens * heads * dims * DTYPE_BYTES[self.dtype]

    @property
    def is_append_only(self) -> bool:
        """Whether a block whose tokens are all there stays as it is for as long as the sequence has it."""
        return self.kind in (CacheKind.FULL, CacheKind.LATENT)

    @property
    def grows(self) -> bool:
        """Whether a longer sequence may need more blocks."""
        return self.kind is not CacheKind.STATE

    def num_places(self, num_tokens: int) -> int:
        """Places that the first `num_tokens` tokens reach to."""
        return 1 if self.kind is CacheKind.STATE else -(-num_tokens // self.block_size)

    def first_seen(self, num_tokens: int) -> int:
        """The first place that the last of `num_tokens` tokens sees; what lies before nobody reads any more."""
        return max(0, num_tokens - self.window) // self.block_size if self.kind is CacheKind.WINDOW else 0

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Blocks that a sequence has at most while it gets to `num_tokens` tokens, at most `step_tokens` at a time."""
        if self.kind is not CacheKind.WINDOW:
            return self.num_places(num_tokens)
        return min(self.num_places(num_tokens), self.num_places(self.window + step_tokens - 2) + 1)

    def most_tokens(self, num_blocks: int, step_tokens: int) -> int:
        """Tokens of the longest sequence that so many blocks suffice for."""
        if not self.grows or (self.window and num_blocks >= self.most_blocks(MAX_INT32, step_tokens)):
            return MAX_INT32 if num_blocks else 0
        return num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All groups of a model.

    `fingerprint` names the model and its weights: two models of equal geometry must not mix.
    """

    fingerprint: Annotated[str, Name(1, 64)]
    groups: Annotated[tuple[KVGroup, ...], Length(1, MAX_GROUPS)]

    @property
    def logical(self) -> tuple[object, ...]:
        """What numbers KV has, wherever it lies: the model, and of each group what is kept and how it is rounded."""
        return (self.fingerprint, *((group.kind.name, group.window, group.dtype) for group in self.groups))

    @property
    def nothing(self) -> Counts:
        """No block of any group."""
        return (0,) * len(self.groups)

    @property
    def token_bytes(self) -> int:
        """That each further token takes."""
        return sum(group.token_bytes for group in self.groups if group.is_append_only)

    @property
    def is_reusable(self) -> bool:
        """Whether another text that begins alike may use blocks that are full: whatever it needs is in them."""
        return len(self.groups) == 1 and self.groups[0].is_append_only

    def differences(self, other: "KVLayout") -> list[str]:
        """Each field that differs, as `field: ours, theirs`; empty when blocks may be exchanged."""
        ours, theirs = self._fields(), other._fields()
        return [
            f"{name}: {ours.get(name, 'nothing')!r} here, {theirs.get(name, 'nothing')!r} there"
            for name in ours | theirs
            if ours.get(name) != theirs.get(name)
        ]

    def _fields(self) -> dict[str, object]:
        fields: dict[str, object] = {"fingerprint": self.fingerprint, "num_groups": len(self.groups)}
        for number, group in enumerate(self.groups):
            for name in group.__dataclass_fields__:
                value = getattr(group, name)
                fields[f"groups[{number}].{name}"] = value.name if isinstance(value, CacheKind) else value
        return fields

    def most_blocks(self, num_tokens: int, step_tokens: int) -> Counts:
        """As `KVGroup.most_blocks` has it."""
        return tuple(group.most_blocks(num_tokens, step_tokens) for group in self.groups)

    def most_tokens(self, num_blocks: Counts, step_tokens: int) -> int:
        """As `KVGroup.most_tokens` has it, of the group that ends first."""
        pairs = zip(self.groups, num_blocks, strict=True)
        return min(group.most_tokens(count, step_tokens) for group, count in pairs)

    def divided(self, num_bytes: int, num_tokens: int) -> Counts:
        """How many blocks of each group so much memory is for, by what sequences of so many tokens have of each."""
        num_bytes -= ALIGNMENT_BYTES * (len(self.groups) - 1)
        shares = self.most_blocks(num_tokens, 1)
        unit = sum(share * group.block_bytes for share, group in zip(shares, self.groups, strict=True))
        return tuple(max(0, num_bytes) * share // unit for share in shares)
