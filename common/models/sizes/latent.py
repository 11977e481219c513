"""Sizes of latent attention. Needs no torch."""

from dataclasses import dataclass

from common.models.sizes.rope import Rope
from common.models.sizes.stacks import Piece, Source, Stack, Stacks
from common.wire.values.kv_layout import CacheKind, KVGroup


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): a vector a token, from which all heads' keys and values follow.

    The cache holds the vector's two parts: a normed latent, and a rotated key that all heads share.
    """

    num_heads: int
    rank: int  # of the latent
    nope_dim: int  # dimensions of a head that do not turn
    rope_dim: int
    value_dim: int
    rope: Rope  # of pairs of neighbours in the checkpoint, which loading takes apart into halves
    scale: float  # of scores
    q_rank: int = 0  # queries are a product with a normed vector of this size; 0: with the normed residual stream
    norm_eps: float = 1e-6  # of the norms of latents and of that vector

    @property
    def group(self) -> tuple[str, int, int, int]:
        """Return what is equal among the layers of a group of KV blocks."""
        return "latent", self.num_heads, self.rank, self.rope_dim

    @property
    def num_q_heads(self) -> int:
        return self.num_heads

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def entry_dim(self) -> int:
        """Return the elements of a token in the cache."""
        return self.rank + self.rope_dim

    @property
    def q_width(self) -> int:
        return self.num_heads * self.query_dim

    @property
    def value_width(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def in_rows(self) -> int:
        """Return the rows of the product into the layer: queries or the vector before them, then latent and key."""
        return (self.q_rank or self.q_width) + self.entry_dim

    @property
    def expanded_rows(self) -> int:
        """Return the rows of keys and values of all heads, each as wide as a latent."""
        return self.num_heads * (self.nope_dim + self.value_dim)

    @property
    def pair_products(self) -> int:
        """Return half the products of a query and a key, and of a weight and a value, where a prompt expands them."""
        return (self.q_width + self.value_width) // 2

    def num_weights(self, hidden_size: int) -> int:
        """Return the elements of all matrices."""
        outer = (self.in_rows + self.value_width) * hidden_size
        return outer + self.q_width * self.q_rank + self.expanded_rows * self.rank

    @property
    def activation_elements(self) -> int:
        """Return the fp32 elements held at once for each token, beside the residual stream.

        Absorbed queries and sums of latents have two bytes an element on a GPU, so both count once.
        """
        return self.in_rows + 2 * self.q_width + self.num_heads * self.entry_dim + self.value_width

    def cache(self, num_layers: int, block_size: int, dtype: str) -> KVGroup:
        """Return the cache of `num_layers` equal layers."""
        return KVGroup(CacheKind.LATENT, num_layers, 1, self.entry_dim, block_size, 0, dtype)

    def stacks(self, source: Source, prefix: str) -> Stacks:
        name, hidden = f"{prefix}.self_attn", source.hidden_size
        stacks = {
            "latent_norm": source.norm(f"{name}.kv_a_layernorm.weight", self.rank),
            "latent_expand": source.matrix(f"{name}.kv_b_proj.weight", self.expanded_rows, self.rank),
            "o": source.matrix(f"{name}.o_proj.weight", hidden, self.value_width),
        }
        if self.q_rank:
            into = [Piece(f"{name}.q_a_proj.weight", (self.q_rank, hidden))]
            stacks["q_norm"] = source.norm(f"{name}.q_a_layernorm.weight", self.q_rank)
            stacks["q"] = Stack(self._queries(f"{name}.q_b_proj.weight", self.q_rank))
        else:
            into = self._queries(f"{name}.q_proj.weight", hidden)
        shape, begin = (self.entry_dim, hidden), self.in_rows - self.entry_dim
        into.append(Piece(f"{name}.kv_a_proj_with_mqa.weight", shape, begin, (0, self.rank)))
        into += self._halves(f"{name}.kv_a_proj_with_mqa.weight", shape, self.rank, begin + self.rank)
        return stacks | {"latent_in": Stack(into)}

    def _queries(self, name: str, width: int) -> list[Piece]:
        shape, pieces = (self.q_width, width), []
        for head in range(self.num_heads):
            begin = head * self.query_dim
            turned = begin + self.nope_dim
            pieces.append(Piece(name, shape, begin, (begin, turned)))
            pieces += self._halves(name, shape, turned, turned)
        return pieces

    def _halves(self, name: str, shape: tuple[int, ...], row: int, begin: int) -> list[Piece]:
        """Return the rotated rows from `row` on: those of even dimensions, then those of odd ones."""
        order = [*range(0, self.rope_dim, 2), *range(1, self.rope_dim, 2)]
        return [Piece(name, shape, begin + place, (row + dim, row + dim + 1)) for place, dim in enumerate(order)]
