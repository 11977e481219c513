"""Bundles of tensors for the gated delta rule."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaWeights:
    """Inputs of a layer of the gated delta rule besides its projections."""

    conv: Tensor  # [channels, 1, conv_width] fp32
    decay: Tensor  # [value_heads] fp32: logarithms of the rates
    dt_bias: Tensor  # [value_heads] fp32
    norm: Tensor  # [value_dim] fp32
    norm_eps: float
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    group: int  # of KV blocks, with the layer's states

    @property
    def num_heads(self) -> int:
        """Return the heads behind the convolution: q, k and v."""
        return 2 * self.num_key_heads + self.num_value_heads

    @property
    def sizes(self) -> dict[str, int]:
        """Return the constants of kernels by name."""
        return {
            "NUM_K": self.num_key_heads,
            "NUM_V": self.num_value_heads,
            "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim,
        }

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences of a step, and the blocks with their states."""

    block_table: Tensor  # [num_seqs, 1] int32
    cu_seqlens: Tensor  # [num_seqs + 1] int32
    seq_lens: Tensor  # [num_seqs] int32; 0 is padding
    is_new: Tensor  # [num_seqs] bool: whether the tokens have not been seen by the state
    one_token_each: bool

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    def operands(self, states: Tensor) -> dict[str, Tensor | int]:
        """Return what kernels need to find the sequences' states in those of a layer, strided by block."""
        return {
            "block_tables_ptr": self.block_table,
            "seq_lens_ptr": self.seq_lens,
            "is_new_ptr": self.is_new,
            "table_stride": self.block_table.stride(0),
            "block_stride": states.stride(0),
        }
