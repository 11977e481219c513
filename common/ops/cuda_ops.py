"""Operations on a GPU: Triton kernels around products chosen by a plan."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from common.kernels.base.attention_operands import AttentionWeights
from common.kernels.base.gpu import gpu_of
from common.kernels.elementwise.embedding import embedding
from common.kernels.elementwise.silu_mul import silu_mul
from common.ops import reference
from common.ops.base import ForwardBatch, Norm, Residual, Weight
from common.ops.cuda_attention import CudaAttention
from common.ops.linear import FusedLinear
from common.ops.linear_plan import Fusion, Kind, LinearPlans, Plan, Plans
from common.ops.workspaces import GroupCache
from common.settings.config import KernelsSection


class CudaOps:
    """`Ops` on a GPU; each kernel can be exchanged for its reference.

    Args:
        caches: of each group of KV blocks.
        kernels: the implementation of each operation.
        max_num_seqs: most sequences of a batch with a token each.
        pdl: launch kernels before their predecessors have finished; pays in a captured graph.
    """

    def __init__(
        self, caches: Sequence[GroupCache], kernels: KernelsSection, max_num_seqs: int, *, pdl: bool = False
    ) -> None:
        self.kernels = kernels
        self.pdl = pdl
        self.groups = [CudaAttention(cache, kernels, max_num_seqs, pdl=pdl) for cache in caches]
        # Planned kernels fuse norm and activation, and exist for two bytes an element only.
        planned = (kernels.linear, kernels.norm, kernels.activation) == ("triton",) * 3
        self._is_planned = planned and caches[0].blocks.element_size() == 2
        self.plans: Plans = LinearPlans(gpu_of(caches[0].blocks.device))
        self._linear = FusedLinear(
            norm=None if kernels.norm == "triton" else reference.rms_norm,
            activation=silu_mul if kernels.activation == "triton" else reference.silu_mul,
            pdl=pdl,
        )

    @property
    def graph_safe(self) -> bool:
        """Tell whether a decode step may be captured; references cannot be, because they wait for the device."""
        kernels = self.kernels
        step = (kernels.norm, kernels.rope, kernels.activation, kernels.decode_attention)
        return all(choice == "triton" for choice in step)

    @property
    def shares_prefixes(self) -> bool:
        """Tell whether blocks shared by rows are read once, so that `ForwardBatch.prefixes` has an effect."""
        return all(group.is_fused for group in self.groups)

    def begin(self, batch: ForwardBatch) -> ForwardBatch:
        if not batch.one_token_each:
            return batch
        if not batch.slots and not all(group.is_fused for group in self.groups):
            pairs = zip(self.groups, batch.block_tables, strict=True)
            batch = replace(batch, slots=tuple(group.row_slots(batch, table) for group, table in pairs))
        if self.kernels.decode_attention == "torch":
            return batch
        return replace(batch, work=tuple(group.divide(batch) for group in self.groups))

    def embed(self, token_ids: Tensor, table: Weight) -> Residual:
        if self.pdl:
            return Residual(embedding(token_ids, table.data, pdl=True))
        return Residual(functional.embedding(token_ids, table.data))

    def norm_linear(self, x: Residual, norm: Norm, weight: Weight) -> Tensor:
        plan = self._plan(Fusion.NORM, weight.num_out, x.rows)
        return self._linear.norm_linear(plan, x, norm, weight, x.rows.dtype)

    def attention(self, qkv: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        return self.groups[weights.group].attend(qkv, weights, layer_id, batch)

    def attention_of_last(self, qkv: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        return self.groups[weights.group].attend_last(qkv, weights, layer_id, batch)

    def linear_add(self, x: Tensor, weight: Weight, residual: Residual) -> Residual:
        plan = self._plan(Fusion.ADD, weight.num_out, x)
        return self._linear.linear_add(plan, x, weight, residual)

    def norm_gate_up(self, x: Residual, norm: Norm, gate_up: Weight) -> Tensor:
        plan = self._plan(Fusion.GATE, gate_up.num_out // 2, x.rows)
        return self._linear.norm_gate_up(plan, x, norm, gate_up)

    def logits(self, x: Residual, norm: Norm, weight: Weight) -> Tensor:
        plan = self._plan(Fusion.LOGITS, weight.num_out, x.rows)
        return self._linear.norm_linear(plan, x, norm, weight, torch.float32)

    def _plan(self, fusion: Fusion, n: int, x: Tensor) -> Plan:
        return self.plans.plan(fusion, x.shape[0], n, x.shape[1]) if self._is_planned else Plan(Kind.CUBLAS)
