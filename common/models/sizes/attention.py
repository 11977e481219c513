"""Sizes of grouped-query attention. Needs no torch."""

from dataclasses import dataclass, field
from typing import NamedTuple

from common.models.sizes.rope import Rope
from common.models.sizes.stacks import Source, Stack, Stacks, permuted, stacked
from common.wire.values.kv_layout import CacheKind, KVGroup


class Heads(NamedTuple):
    """Geometry of attention."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int


class PairProducts(NamedTuple):
    """Half the products of a pair of tokens in attention.

    everywhere: in layers that see all tokens. in_window: in layers that see `window` tokens.
    """

    everywhere: int
    in_window: int
    window: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention over the whole context or the last tokens, behind a norm."""

    heads: Heads
    rope: Rope
    scale: float = 0.0  # of scores; 0: head_dim ** -0.5
    window: int = 0  # tokens seen by a token, itself included; 0: all
    qk_norm: bool = False  # query and key heads are normed before the rotation
    value_norm: bool = False  # value heads are normed, without weights
    shares_kv: bool = False  # values are the keys before norm and rotation, and have no weights
    has_bias: bool = False  # added to Q, K and V
    has_output_bias: bool = False
    has_gate: bool = False  # the output is multiplied by a sigmoid; in q_proj each head's rows are followed by a gate's
    has_sinks: bool = False  # each query head has a score of no token, in the sum of weights only
    kv_scales: tuple[float, float] = field(default=(1.0, 1.0), compare=False)
    """Of keys and of values in an e4m3 cache, which keeps numbers divided by them; the kernels are the same."""

    @property
    def group(self) -> tuple[Heads, int]:
        """Return what is equal among the layers of a group of KV blocks."""
        return self.heads, self.window

    @property
    def num_q_heads(self) -> int:
        return self.heads.num_q_heads

    @property
    def rope_dim(self) -> int:
        """Return the dimensions of the rotary table."""
        return self.heads.head_dim

    @property
    def q_width(self) -> int:
        return self.heads.num_q_heads * self.heads.head_dim

    @property
    def kv_width(self) -> int:
        return self.heads.num_kv_heads * self.heads.head_dim

    @property
    def qkv_width(self) -> int:
        """Return the rows of the product into attention."""
        return self.q_width + (1 if self.shares_kv else 2) * self.kv_width

    @property
    def pair_products(self) -> int:
        """Return half the products of a query and a key, and of a weight and a value, for a pair of tokens."""
        return self.q_width

    def num_weights(self, hidden_size: int) -> int:
        """Return the elements of all matrices."""
        return self.num_rows * hidden_size

    @property
    def activation_elements(self) -> int:
        """Return the elements held at once for each token, beside the residual stream."""
        return self.num_rows

    @property
    def num_rows(self) -> int:
        """Return the rows of all matrices, each as wide as the residual stream."""
        return self.qkv_width + (1 + self.has_gate) * self.q_width

    def cache(self, num_layers: int, block_size: int, dtype: str) -> KVGroup:
        """Return the cache of `num_layers` equal layers."""
        _, num_kv_heads, head_dim = self.heads
        kind = CacheKind.WINDOW if self.window else CacheKind.FULL
        return KVGroup(kind, num_layers, num_kv_heads, head_dim, block_size, self.window, dtype)

    def stacks(self, source: Source, prefix: str) -> Stacks:
        name, head_dim, hidden = f"{prefix}.self_attn", self.heads.head_dim, source.hidden_size
        rows = [("q", self.q_width), ("k", self.kv_width), ("v", self.kv_width)][: 2 if self.shares_kv else 3]
        stacks = {
            "qkv": stacked([(f"{name}.{each}_proj.weight", count) for each, count in rows], hidden),
            "o": source.matrix(f"{name}.o_proj.weight", hidden, self.q_width),
        }
        if self.has_bias:
            stacks["qkv_bias"] = stacked([(f"{name}.{each}_proj.bias", count) for each, count in rows])
        if self.has_output_bias:
            stacks["o_bias"] = stacked([(f"{name}.o_proj.bias", hidden)])
        if self.has_sinks:
            stacks["sinks"] = stacked([(f"{name}.sinks", self.num_q_heads)])._replace(dtype="float32")
        if self.qk_norm:
            stacks["q_norm"] = source.norm(f"{name}.q_norm.weight", head_dim)
            stacks["k_norm"] = source.norm(f"{name}.k_norm.weight", head_dim)
        if self.has_gate or self._is_reordered:
            stacks |= self._rearranged(stacks, name, hidden)
        return stacks

    @property
    def _is_reordered(self) -> bool:
        return self.rope.is_leading and 2 * len(self.rope.inverse_frequencies) < self.heads.head_dim

    def _rearranged(self, stacks: Stacks, name: str, hidden: int) -> Stacks:
        """Return stacks with gates apart, and heads whose dimensions stand so that the first half turns with the other.

        Scores do not depend on the order of dimensions, if Q and K have the same.
        """
        num_q, num_kv, dim = self.heads
        stride = 2 * dim if self.has_gate else dim
        q_shape, kv_shape = (num_q * stride, hidden), (num_kv * dim, hidden)
        q = [_shifted(self._order, head * stride) for head in range(num_q)]
        k = [_shifted(self._order, head * dim) for head in range(num_kv)]
        pieces = permuted(f"{name}.q_proj.weight", q_shape, [each for head in q for each in head])
        for piece in permuted(f"{name}.k_proj.weight", kv_shape, [each for head in k for each in head]):
            pieces.append(piece._replace(begin=piece.begin + num_q * dim))
        pieces += permuted(f"{name}.v_proj.weight", kv_shape, [(0, num_kv * dim)])
        pieces[-1] = pieces[-1]._replace(begin=(num_q + num_kv) * dim)
        changed = {"qkv": Stack(pieces)}
        if self.has_gate:
            gates = [(head * stride + dim, (head + 1) * stride) for head in range(num_q)]
            changed["gate"] = Stack(permuted(f"{name}.q_proj.weight", q_shape, gates))
        for norm in ("q_norm", "k_norm"):
            if norm in stacks:
                changed[norm] = stacks[norm]._replace(pieces=permuted(f"{name}.{norm}.weight", (dim,), self._order))
        return changed

    @property
    def _order(self) -> list[tuple[int, int]]:
        """Ranges of a head's dimensions: both rotated halves, each followed by half of the unrotated dimensions."""
        half, turned = self.heads.head_dim // 2, len(self.rope.inverse_frequencies)
        still = half - turned
        ranges = [
            (0, turned), (2 * turned, 2 * turned + still), (turned, 2 * turned), (2 * turned + still, 2 * half),
        ]  # fmt: skip
        return [each for each in ranges if each[0] < each[1]]


def _shifted(ranges: list[tuple[int, int]], by: int) -> list[tuple[int, int]]:
    return [(begin + by, end + by) for begin, end in ranges]
