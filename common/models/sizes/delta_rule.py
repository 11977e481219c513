"""Sizes of the gated delta rule. Needs no torch."""

from dataclasses import dataclass

from common.models.sizes.stacks import Piece, Source, Stack, Stacks, permuted, stacked
from common.wire.values.kv_layout import CacheKind, KVGroup


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Gated delta rule: a state of each value head instead of keys and values, behind a norm and a convolution."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int  # tokens seen by the convolution
    by_key_head: bool = False  # in the checkpoint, all inputs of a key head and its value heads stand together

    @property
    def group(self) -> "DeltaRule":
        """Return what is equal among the layers of a group of states."""
        return self

    @property
    def num_q_heads(self) -> int:
        return 0

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
        inputs = stacked([(f"{name}.in_proj_{each}.weight", count) for each, count in rows], hidden)
        return {
            "delta_in": self._regrouped(name, hidden) if self.by_key_head else inputs,
            "conv": stacked([(f"{name}.conv1d.weight", conv[0])], *conv[1:])._replace(dtype="float32"),
            "decay": stacked([(f"{name}.A_log", heads)])._replace(dtype="float32"),
            "dt_bias": stacked([(f"{name}.dt_bias", heads)])._replace(dtype="float32"),
            "delta_norm": stacked([(f"{name}.norm.weight", self.value_dim)])._replace(dtype="float32"),
            "delta_out": source.matrix(f"{name}.out_proj.weight", hidden, self.value_width),
        }

    def _regrouped(self, name: str, hidden: int) -> Stack:
        """Return the product into the layer from rows by key head: q, k, v and z, and in another tensor b and a."""
        per_key = self.num_value_heads // self.num_key_heads
        key, values = self.key_dim, per_key * self.value_dim
        stride, begin, pieces = 2 * (key + values), 0, list[Piece]()
        ranges = [(0, key), (key, 2 * key), (2 * key, 2 * key + values), (2 * key + values, stride)]
        of_heads = [(f"{name}.in_proj_qkvz.weight", stride, ranges)]
        of_heads.append((f"{name}.in_proj_ba.weight", 2 * per_key, [(0, per_key), (per_key, 2 * per_key)]))
        for tensor, step, parts in of_heads:
            rows = [
                (head * step + first, head * step + end) for first, end in parts for head in range(self.num_key_heads)
            ]
            for piece in permuted(tensor, (self.num_key_heads * step, hidden), rows):
                pieces.append(piece._replace(begin=begin + piece.begin))
            begin += self.num_key_heads * step
        return Stack(pieces)
