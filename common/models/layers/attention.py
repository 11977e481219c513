"""Attention as a part of a layer."""

from dataclasses import dataclass

from torch import Tensor

from common.models.layers.output import Output
from common.models.layers.tasks import Task, stream, zeros
from common.models.layers.tensors import LayerTensors
from common.models.sizes.attention import Attention
from common.ops.base import AttentionWeights, ForwardBatch, Norm, Ops, Residual, Weight


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Norm, Q, K and V, attention, and the product behind attention.

    `layer_id` is the layer's place in the cache of its group.
    """

    norm: Norm
    qkv: Weight  # [(q_heads + 2 * kv_heads) * head_dim, hidden]
    attention: AttentionWeights
    out: Output  # [hidden, q_heads * head_dim]
    layer_id: int
    gate: Weight | None = None  # [q_heads * head_dim, hidden]

    def forward(self, x: Residual, batch: ForwardBatch, ops: Ops, *, of_last: bool) -> Residual:
        """Write K and V of all tokens; return the stream of all tokens, or with `of_last` of each prompt's last."""
        qkv = self.first_product(ops, x)
        x = Residual(x.rows)  # the norm has added the parts
        if of_last:
            attended = ops.attention_of_last(qkv, self.attention, self.layer_id, batch)
            x = Residual(x.rows[batch.last_tokens])
        else:
            attended = ops.attention(qkv, self.attention, self.layer_id, batch)
        if self.gate is not None:
            attended = ops.sigmoid_mul(attended, ops.norm_linear(x, self.norm, self.gate))
        return self.out.add(ops, attended, x)

    def attend(self, ops: Ops, batch: ForwardBatch, *, of_last: bool) -> None:
        """Attend with zeros, to warm up."""
        attention = ops.attention_of_last if of_last else ops.attention
        batch = ops.begin(batch)
        qkv = zeros(self.qkv, batch.token_ids.shape[0], self.qkv.num_out)
        attention(qkv, self.attention, self.layer_id, batch)

    def zeros(self, ops: Ops, num_tokens: int) -> Residual:
        """Return a residual stream of zeros with the part's result added."""
        return self.out.zeros(ops, num_tokens)

    def product_tasks(self, ops: Ops, num_tokens: int) -> list[Task]:
        """Return the products on zeros."""
        tasks: list[Task] = [lambda: self.first_product(ops, stream(self.qkv, num_tokens))]
        if (gate := self.gate) is not None:
            tasks.append(lambda: ops.norm_linear(stream(gate, num_tokens), self.norm, gate))
        return tasks

    def first_product(self, ops: Ops, x: Residual) -> Tensor:
        """Return the first product of the part."""
        return ops.norm_linear(x, self.norm, self.qkv)


def attention_part(
    attention: Attention, tensors: LayerTensors, group: int, layer_id: int, rope: Tensor, query_factors: Tensor | None
) -> AttentionPart:
    """Build the part from its sizes and tensors."""
    weights = AttentionWeights(
        q_norm=tensors.get("q_norm"),
        k_norm=tensors.get("k_norm"),
        norm_eps=tensors.norm_eps,
        rope=rope,
        query_factors=query_factors,
        num_q_heads=attention.heads.num_q_heads,
        num_kv_heads=attention.heads.num_kv_heads,
        head_dim=attention.heads.head_dim,
        scale=attention.scale or attention.heads.head_dim**-0.5,
        window=attention.window,
        norms_values=attention.value_norm,
        shares_kv=attention.shares_kv,
        sinks=tensors.get("sinks"),
        bias=tensors.get("qkv_bias"),
        k_scale=attention.kv_scales[0],
        v_scale=attention.kv_scales[1],
        group=group,
    )
    return AttentionPart(
        norm=tensors.norm("before_mixer"),
        qkv=tensors.unbiased("qkv"),  # the bias is added within attention
        attention=weights,
        out=tensors.output("o", "after_mixer"),
        layer_id=layer_id,
        gate=tensors.weight("gate") if attention.has_gate else None,
    )
