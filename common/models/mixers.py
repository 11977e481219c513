"""Sizes of what mixes tokens in a layer: attention, and the gated delta rule. Needs no torch."""

from dataclasses import dataclass
from typing import NamedTuple

from common.models.stacks import Source, Stack, Stacks, permuted, stacked
from common.wire.values.kv_layout import CacheKind, KVGroup


class Heads(NamedTuple):
    """Geometry of attention."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention over the whole context, behind a norm."""

    heads: Heads
    inverse_frequencies: tuple[float, ...]  # radians a position; fewer than head_dim / 2 leave dimensions unrotated
    qk_norm: bool = False  # query and key heads are normed before the rotation
    has_bias: bool = False  # added to Q, K and V
    has_gate: bool = False  # the output is multiplied by a sigmoid; in q_proj each head's rows are followed by a gate's

    @property
    def q_width(self) -> int:
        return self.heads.num_q_heads * self.heads.head_dim

    @property
    def kv_width(self) -> int:
        return self.heads.num_kv_heads * self.heads.head_dim

    @property
    def num_rows(self) -> int:
        """Return the rows of all matrices, each as wide as the residual stream."""
        return (2 + self.has_gate) * self.q_width + 2 * self.kv_width

    def cache(self, num_layers: int, block_size: int, dtype: str) -> KVGroup:
        """Return the cache of `num_layers` equal layers."""
        _, num_kv_heads, head_dim = self.heads
        return KVGroup(CacheKind.FULL, num_layers, num_kv_heads, head_dim, block_size, 0, dtype)

    def stacks(self, source: Source, prefix: str) -> Stacks:
        name, head_dim, hidden = f"{prefix}.self_attn", self.heads.head_dim, source.hidden_size
        rows = [("q", self.q_width), ("k", self.kv_width), ("v", self.kv_width)]
        stacks = {
            "attention_norm": source.norm(f"{prefix}.input_layernorm.weight", hidden),
            "qkv": stacked([(f"{name}.{each}_proj.weight", count) for each, count in rows], hidden),
            "o": source.matrix(f"{name}.o_proj.weight", hidden, self.q_width),
        }
        if self.has_bias:
            stacks["qkv_bias"] = stacked([(f"{name}.{each}_proj.bias", count) for each, count in rows])
        if self.qk_norm:
            stacks["q_norm"] = source.norm(f"{name}.q_norm.weight", head_dim)
            stacks["k_norm"] = source.norm(f"{name}.k_norm.weight", head_dim)
        if self.has_gate or self._is_partly_rotated:
            stacks |= self._rearranged(stacks, name, hidden)
        return stacks

    @property
    def _is_partly_rotated(self) -> bool:
        return 2 * len(self.inverse_frequencies) < self.heads.head_dim

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
        half, turned = self.heads.head_dim // 2, len(self.inverse_frequencies)
        still = half - turned
        ranges = [
            (0, turned), (2 * turned, 2 * turned + still), (turned, 2 * turned), (2 * turned + still, 2 * half),
        ]  # fmt: skip
        return [each for each in ranges if each[0] < each[1]]


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Gated delta rule: a state of each value head instead of keys and values, behind a norm and a convolution."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int  # tokens seen by the convolution

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.value_width

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def in_rows(self) -> int:
        """Return the rows of the product into the layer: convolved, gate, beta and decay."""
        return self.conv_channels + self.value_width + 2 * self.num_value_heads

    @property
    def num_rows(self) -> int:
        """Return the rows of all matrices, each as wide as the residual stream."""
        return self.in_rows + self.value_width

    @property
    def state_rows(self) -> int:
        """Return the rows of a state, each of `key_dim * value_dim` elements.

        A row for each value head, then the convolution's last inputs, then the positions.
        """
        row = self.key_dim * self.value_dim
        return self.num_value_heads + -(-self.conv_channels * self.conv_width // row) + 1

    def cache(self, num_layers: int, block_size: int, dtype: str) -> KVGroup:
        """Return the states of `num_layers` equal layers: fp32, whatever the model's dtype."""
        return KVGroup(CacheKind.STATE, num_layers, self.state_rows, self.key_dim * self.value_dim, 1, 0, "float32")

    def stacks(self, source: Source, prefix: str) -> Stacks:
        name, heads = f"{prefix}.linear_attn", self.num_value_heads
        conv, hidden = (self.conv_channels, 1, self.conv_width), source.hidden_size
        rows = [("qkv", self.conv_channels), ("z", self.value_width), ("b", heads), ("a", heads)]
        return {
            "attention_norm": source.norm(f"{prefix}.input_layernorm.weight", hidden),
            "delta_in": stacked([(f"{name}.in_proj_{each}.weight", count) for each, count in rows], hidden),
            "conv": stacked([(f"{name}.conv1d.weight", conv[0])], *conv[1:])._replace(dtype="float32"),
            "decay": stacked([(f"{name}.A_log", heads)])._replace(dtype="float32"),
            "dt_bias": stacked([(f"{name}.dt_bias", heads)])._replace(dtype="float32"),
            "delta_norm": stacked([(f"{name}.norm.weight", self.value_dim)])._replace(dtype="float32"),
            "delta_out": source.matrix(f"{name}.out_proj.weight", hidden, self.value_width),
        }


Mixer = Attention | DeltaRule


def _shifted(ranges: list[tuple[int, int]], by: int) -> list[tuple[int, int]]:
    return [(begin + by, end + by) for begin, end in ranges]
