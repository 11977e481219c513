"""Parts of a layer with their weights; each adds its result to the residual stream."""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.models.base import Task
from common.ops.base import AttentionWeights, DeltaWeights, ForwardBatch, Norm, Ops, Residual, Weight


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
    gate: Weight | None = None  # [q_heads * head_dim, hidden]

    def forward(self, x: Residual, batch: ForwardBatch, ops: Ops, *, of_last: bool) -> Residual:
        """Write K and V of all tokens; return the stream of all tokens, or with `of_last` of each prompt's last."""
        qkv = ops.norm_linear(x, self.norm, self.qkv)
        x = Residual(x.rows)  # the norm has added the parts
        if of_last:
            attended = ops.attention_of_last(qkv, self.attention, self.layer_id, batch)
            x = Residual(x.rows[batch.last_tokens])
        else:
            attended = ops.attention(qkv, self.attention, self.layer_id, batch)
        if self.gate is not None:
            attended = ops.sigmoid_mul(attended, ops.norm_linear(x, self.norm, self.gate))
        return ops.linear_add(attended, self.o, x)

    def attend(self, ops: Ops, batch: ForwardBatch, *, of_last: bool) -> None:
        """Attend with zeros, to warm up."""
        attention = ops.attention_of_last if of_last else ops.attention
        batch = ops.begin(batch)
        qkv = zeros(self.qkv, batch.token_ids.shape[0], self.qkv.num_out)
        attention(qkv, self.attention, self.layer_id, batch)

    def product_tasks(self, ops: Ops, num_tokens: int, then: "MLPPart") -> list[Task]:
        """Return the products on zeros, and the first of `then` behind the addition of this part's result."""
        tasks: list[Task] = [
            lambda: ops.norm_linear(stream(self.qkv, num_tokens), self.norm, self.qkv),
            lambda: ops.norm_gate_up(added(ops, self.o, num_tokens), then.norm, then.gate_up),
        ]
        if (gate := self.gate) is not None:
            tasks.append(lambda: ops.norm_linear(stream(gate, num_tokens), self.norm, gate))
        return tasks

    def first_product(self, ops: Ops, x: Residual) -> Tensor:
        """Return the first product of the part."""
        return ops.norm_linear(x, self.norm, self.qkv)


@dataclass(frozen=True, slots=True)
class DeltaPart:
    """Norm, a product of all inputs, the gated delta rule, and the product behind it.

    `layer_id` is the layer's place in the states of its group.
    """

    norm: Norm
    inputs: Weight  # [channels + value_width + 2 * value_heads, hidden]
    delta: DeltaWeights
    out: Weight  # [hidden, value_width]
    layer_id: int

    def forward(self, x: Residual, batch: ForwardBatch, ops: Ops, *, of_last: bool) -> Residual:
        """Advance the states by all tokens; return the stream of all, or with `of_last` of each prompt's last token."""
        mixed = ops.delta_rule(self.first_product(ops, x), self.delta, self.layer_id, batch)
        x = Residual(x.rows)  # the norm has added the parts
        if of_last:
            mixed, x = mixed[batch.last_tokens], Residual(x.rows[batch.last_tokens])
        return ops.linear_add(mixed, self.out, x)

    def attend(self, ops: Ops, batch: ForwardBatch, *, of_last: bool) -> None:
        """Run over zeros, to warm up."""
        batch = ops.begin(batch)
        inputs = zeros(self.inputs, batch.token_ids.shape[0], self.inputs.num_out)
        ops.delta_rule(inputs, self.delta, self.layer_id, batch)

    def product_tasks(self, ops: Ops, num_tokens: int, then: "MLPPart") -> list[Task]:
        """Return the products on zeros, and the first of `then` behind the addition of this part's result."""
        return [
            lambda: self.first_product(ops, stream(self.inputs, num_tokens)),
            lambda: ops.norm_gate_up(added(ops, self.out, num_tokens), then.norm, then.gate_up),
        ]

    def first_product(self, ops: Ops, x: Residual) -> Tensor:
        """Return the first product of the part."""
        return ops.norm_linear(x, self.norm, self.inputs)


MixerPart = AttentionPart | DeltaPart


@dataclass(frozen=True, slots=True)
class MLPPart:
    """Norm, gate and up, activation, and down."""

    norm: Norm
    gate_up: Weight  # [2 * inner, hidden]
    down: Weight  # [hidden, inner]

    def forward(self, x: Residual, ops: Ops) -> Residual:
        return ops.linear_add(ops.norm_gate_up(x, self.norm, self.gate_up), self.down, x)

    def product_tasks(self, ops: Ops, num_tokens: int, then: MixerPart) -> list[Task]:
        """Return the products on zeros, and the first of `then` behind the addition of this part's result."""
        return [
            lambda: ops.norm_gate_up(stream(self.gate_up, num_tokens), self.norm, self.gate_up),
            lambda: then.first_product(ops, added(ops, self.down, num_tokens)),
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
