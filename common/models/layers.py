"""Parts of a layer with their weights; each adds its result to the residual stream."""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.models.base import Task
from common.ops.base import AttentionWeights, ForwardBatch, Norm, Ops, Residual, Weight


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Norm, Q, K and V, attention, and the product behind attention.

    `layer_id` is the layer's place in the cache of its group.
    """

    norm: Norm
    qkv: Weight  # [(q_heads + 2 * kv_heads) * head_dim, hidden]
    attention: AttentionWeights
    o: Weight  # [hidden, q_heads * head_dim]
    layer_id: int

    def forward(self, x: Residual, batch: ForwardBatch, ops: Ops, *, of_last: bool) -> Residual:
        """Write K and V of all tokens; return the stream of all tokens, or with `of_last` of each prompt's last."""
        qkv = ops.norm_linear(x, self.norm, self.qkv)
        if not of_last:
            return ops.linear_add(ops.attention(qkv, self.attention, self.layer_id, batch), self.o, x)
        attended = ops.attention_of_last(qkv, self.attention, self.layer_id, batch)
        return ops.linear_add(attended, self.o, Residual(x.rows[batch.last_tokens]))  # the norm has added the parts

    def attend(self, ops: Ops, batch: ForwardBatch, *, of_last: bool) -> None:
        """Attend with zeros, to warm up."""
        attention = ops.attention_of_last if of_last else ops.attention
        batch = ops.begin(batch)
        qkv = zeros(self.qkv, batch.token_ids.shape[0], self.qkv.num_out)
        attention(qkv, self.attention, self.layer_id, batch)

    def product_tasks(self, ops: Ops, num_tokens: int, then: "MLPPart") -> list[Task]:
        """Return the products on zeros, and the first of `then` behind the addition of this part's result."""
        return [
            lambda: ops.norm_linear(stream(self.qkv, num_tokens), self.norm, self.qkv),
            lambda: ops.norm_gate_up(added(ops, self.o, num_tokens), then.norm, then.gate_up),
        ]


@dataclass(frozen=True, slots=True)
class MLPPart:
    """Norm, gate and up, activation, and down."""

    norm: Norm
    gate_up: Weight  # [2 * inner, hidden]
    down: Weight  # [hidden, inner]

    def forward(self, x: Residual, ops: Ops) -> Residual:
        return ops.linear_add(ops.norm_gate_up(x, self.norm, self.gate_up), self.down, x)

    def product_tasks(self, ops: Ops, num_tokens: int, then: AttentionPart) -> list[Task]:
        """Return the products on zeros, and the first of `then` behind the addition of this part's result."""
        return [
            lambda: ops.norm_gate_up(stream(self.gate_up, num_tokens), self.norm, self.gate_up),
            lambda: ops.norm_linear(added(ops, self.down, num_tokens), then.norm, then.qkv),
        ]


def stream(weight: Weight, num_tokens: int) -> Residual:
    """Return a residual stream of zeros that a product with `weight` takes."""
    return Residual(zeros(weight, num_tokens, weight.num_in))


def added(ops: Ops, weight: Weight, num_tokens: int) -> Residual:
    """Return a residual stream of zeros with a product of zeros and `weight` added."""
    return ops.linear_add(
        zeros(weight, num_tokens, weight.num_in), weight, Residual(zeros(weight, num_tokens, weight.num_out))
    )


def zeros(weight: Weight, num_tokens: int, width: int) -> Tensor:
    """Return activations of zeros on the device of `weight`: `[num_tokens, width]`."""
    return torch.zeros((num_tokens, width), dtype=weight.data.dtype, device=weight.data.device)
