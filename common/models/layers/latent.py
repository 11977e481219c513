"""Latent attention as a part of a layer."""

from dataclasses import dataclass

from torch import Tensor

from common.models.layers.output import Output
from common.models.layers.tasks import Task, stream, zeros
from common.models.layers.tensors import LayerTensors
from common.models.sizes.latent import Latent
from common.ops.base import ForwardBatch, LatentWeights, Norm, Ops, Residual, Weight


@dataclass(frozen=True, slots=True)
class LatentPart:
    """Norm, queries and latents, latent attention, and the product behind attention.

    `layer_id` is the layer's place in the cache of its group.
    """

    norm: Norm
    inputs: Weight  # [queries or the vector before them, then rank + rope_dim, hidden]
    latent: LatentWeights
    out: Output  # [hidden, num_heads * value_dim]
    layer_id: int
    q_norm: Norm | None = None  # of the vector before the queries
    q: Weight | None = None  # [num_heads * query_dim, q_rank]

    def forward(self, x: Residual, batch: ForwardBatch, ops: Ops, *, of_last: bool) -> Residual:
        """Write latents of all tokens; return the stream of all tokens, or with `of_last` of each prompt's last."""
        inputs = self.first_product(ops, x)
        x = Residual(x.rows)  # the norm has added the parts
        attended = self._attended(ops, inputs, batch, of_last=of_last)
        return self.out.add(ops, attended, Residual(x.rows[batch.last_tokens]) if of_last else x)

    def _attended(self, ops: Ops, inputs: Tensor, batch: ForwardBatch, *, of_last: bool) -> Tensor:
        attention = ops.latent_attention_of_last if of_last else ops.latent_attention
        num_entries = self.latent.rank + self.latent.rope_dim
        q, kv = inputs[:, :-num_entries], inputs[:, -num_entries:]
        if self.q is not None and self.q_norm is not None:
            q = ops.norm_linear(Residual(q.contiguous()), self.q_norm, self.q)
        return attention(q, kv, self.latent, self.layer_id, batch)

    def attend(self, ops: Ops, batch: ForwardBatch, *, of_last: bool) -> None:
        """Attend with zeros, to warm up."""
        batch = ops.begin(batch)
        inputs = zeros(self.inputs, batch.token_ids.shape[0], self.inputs.num_out)
        self._attended(ops, inputs, batch, of_last=of_last)

    def zeros(self, ops: Ops, num_tokens: int) -> Residual:
        """Return a residual stream of zeros with the part's result added."""
        return self.out.zeros(ops, num_tokens)

    def product_tasks(self, ops: Ops, num_tokens: int) -> list[Task]:
        """Return the products on zeros."""
        tasks: list[Task] = [lambda: self.first_product(ops, stream(self.inputs, num_tokens))]
        if (norm := self.q_norm) is not None and (q := self.q) is not None:
            tasks.append(lambda: ops.norm_linear(stream(q, num_tokens), norm, q))
        return tasks

    def first_product(self, ops: Ops, x: Residual) -> Tensor:
        """Return the first product of the part."""
        return ops.norm_linear(x, self.norm, self.inputs)


def latent_part(
    latent: Latent, tensors: LayerTensors, group: int, layer_id: int, rope: Tensor, query_factors: Tensor | None
) -> LatentPart:
    """Build the part from its sizes and tensors."""
    weights = LatentWeights(
        norm=tensors["latent_norm"],
        norm_eps=latent.norm_eps,
        expand=tensors["latent_expand"].view(latent.num_heads, -1, latent.rank),
        rope=rope,
        query_factors=query_factors,
        nope_dim=latent.nope_dim,
        scale=latent.scale,
        group=group,
    )
    return LatentPart(
        norm=tensors.norm("before_mixer"),
        inputs=tensors.weight("latent_in"),
        latent=weights,
        out=tensors.output("o", "after_mixer"),
        layer_id=layer_id,
        q_norm=Norm(tensors["q_norm"], latent.norm_eps) if latent.q_rank else None,
        q=tensors.weight("q") if latent.q_rank else None,
    )
