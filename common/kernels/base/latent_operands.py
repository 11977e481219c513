"""Bundle of tensors that kernels of latent attention take whole, and the shape of a program's work."""

from dataclasses import dataclass

from torch import Tensor

MIN_DIM = 16
"""Elements that tensor cores multiply at once."""


def are_computed(*dims: int) -> bool:
    """Tell whether kernels compute these dimensions of latent attention: powers of two, MIN_DIM or more."""
    return all(dim >= MIN_DIM and dim & (dim - 1) == 0 for dim in dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Shape of a program's work, with its warps and pipeline stages."""

    queries: int = 1
    keys: int  # multiplied at once
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights:
    """Inputs of latent attention besides queries and latents.

    `expand` serves both forms of attention. Applied to latents, it gives keys and values of all heads. Applied to
    queries and to sums of latents, by its parts, it is absorbed, and attention reads latents alone.
    """

    norm: Tensor  # [rank]: of latents
    norm_eps: float
    expand: Tensor  # [num_heads, nope_dim + value_dim, rank], contiguous: rows of a head's keys, then of its values
    rope: Tensor  # [max_positions, rope_dim] fp32: cos of the half angles, then sin of them
    nope_dim: int  # dimensions of a query head that do not turn
    scale: float  # of scores
    group: int = 0  # of KV blocks, with the layer's cache
    query_factors: Tensor | None = None  # [max_positions] fp32: of all dimensions of queries, by position

    @property
    def num_heads(self) -> int:
        return self.expand.shape[0]

    @property
    def rank(self) -> int:
        return self.expand.shape[2]

    @property
    def rope_dim(self) -> int:
        return self.rope.shape[1]

    @property
    def value_dim(self) -> int:
        return self.expand.shape[1] - self.nope_dim

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def keys(self) -> Tensor:
        """Return the rows of keys: `[num_heads, nope_dim, rank]`, a view."""
        return self.expand[:, : self.nope_dim]

    @property
    def values(self) -> Tensor:
        """Return the rows of values: `[num_heads, value_dim, rank]`, a view."""
        return self.expand[:, self.nope_dim :]
