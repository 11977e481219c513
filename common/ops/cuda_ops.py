"""Operations on a GPU: Triton kernels around products chosen by a plan."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from common.kernels.base.attention_operands import AttentionWeights
from common.kernels.base.delta_operands import Sequences
from common.kernels.base.gpu import gpu_of
from common.kernels.delta.chunk_overlaps import find_overlaps
from common.kernels.delta.chunk_scan import is_scannable, scan_chunks
from common.kernels.delta.convolution import convolve
from common.kernels.delta.gated_norm import gated_norm
from common.kernels.delta.prompt_convolution import convolve_prompts
from common.kernels.delta.recurrence import recur
from common.kernels.delta.states import begin_states
from common.kernels.elementwise.cap_logits import cap_logits
from common.kernels.elementwise.embedding import embedding
from common.kernels.elementwise.gate_mul import gate_mul
from common.ops import reference
from common.ops.base import (
    Activation,
    DecodeWork,
    DeltaWeights,
    ExpertWeights,
    ForwardBatch,
    GroupCache,
    LatentWeights,
    Norm,
    Residual,
    Router,
    Routing,
    RowsWork,
    StateWork,
    Weight,
)
from common.ops.cuda_attention import CudaAttention
from common.ops.cuda_experts import CudaExperts
from common.ops.cuda_latent import CudaLatent
from common.ops.linear import FusedLinear
from common.ops.linear_plan import Fusion, Kind, LinearPlans, Plan, Plans
from common.ops.packed_linear import PackedLinear
from common.ops.quantized_linear import QuantizedLinear
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
        self.caches = tuple(caches)
        self.groups = [self._group(cache, max_num_seqs) for cache in caches]
        # Planned kernels fuse norm and activation, and exist for models of two bytes an element only. These alone have
        # caches of one byte.
        planned = (kernels.linear, kernels.norm, kernels.activation) == ("triton",) * 3
        self._is_planned = planned and caches[0].blocks.element_size() <= 2
        gpu = gpu_of(caches[0].blocks.device)
        self._plans: Plans = LinearPlans(gpu)
        self._linear = FusedLinear(
            norm=None if kernels.norm == "triton" else reference.rms_norm,
            gate=gate_mul if kernels.activation == "triton" else reference.gate_mul,
            pdl=pdl,
        )
        self._quantized = QuantizedLinear(self._linear, gpu, self._plans if planned else None)
        self._packed = PackedLinear(self._linear, self._plans if planned else None)
        self._experts = CudaExperts(gpu, is_reference=kernels.experts == "torch", pdl=pdl)

    @property
    def plans(self) -> Plans:
        """Return the source of the plans of products; products of codes follow it, unless they are the reference's."""
        return self._plans

    @plans.setter
    def plans(self, plans: Plans) -> None:
        self._plans = plans
        for products in (self._quantized, self._packed):
            if products.plans is not None:
                products.plans = plans

    def _of_codes(self, weight: Weight) -> QuantizedLinear | PackedLinear:
        return self._packed if weight.is_weight_only else self._quantized

    def _group(self, cache: GroupCache, max_num_seqs: int) -> CudaAttention | CudaLatent | None:
        """Return the attention over a group of KV blocks; None for states."""
        if cache.has_states:
            return None
        attention = CudaLatent if cache.has_latents else CudaAttention
        return attention(cache, self.kernels, max_num_seqs, pdl=self.pdl)

    @property
    def graph_safe(self) -> bool:
        """Tell whether a decode step may be captured; references cannot be, because they wait for the device."""
        kernels = self.kernels
        step = (kernels.norm, kernels.rope, kernels.activation, kernels.decode_attention, kernels.experts)
        return all(choice == "triton" for choice in step)

    @property
    def shares_prefixes(self) -> bool:
        """Tell whether blocks shared by rows are read once, so that `ForwardBatch.prefixes` has an effect."""
        return all(group is not None for group in self.groups) and any(
            group.shares_prefixes for group in self.groups if group
        )

    def begin(self, batch: ForwardBatch) -> ForwardBatch:
        written_apart = [group is not None and not group.is_fused for group in self.groups]
        if batch.one_token_each and not batch.slots and any(written_apart):
            slots = [
                group.row_slots(batch, table) if group and is_apart else batch.positions
                for group, table, is_apart in zip(self.groups, batch.block_tables, written_apart, strict=True)
            ]
            batch = replace(batch, slots=tuple(slots))
        return replace(batch, work=tuple(self._work(number, batch) for number in range(len(self.groups))))

    def _work(self, number: int, batch: ForwardBatch) -> DecodeWork | RowsWork | StateWork | None:
        group, cache, table = self.groups[number], self.caches[number], batch.block_tables[number]
        if group is None:
            return StateWork(begin_states(cache.blocks, table, batch.cu_seqlens, batch.seq_lens, pdl=self.pdl))
        if isinstance(group, CudaLatent):
            return group.divide(batch, number)
        divides = batch.one_token_each and self.kernels.decode_attention != "torch"
        return group.divide(batch) if divides else None

    def embed(self, token_ids: Tensor, table: Weight, scale: float = 1.0) -> Residual:
        rounded = torch.tensor(scale, dtype=table.data.dtype).item()
        if self.pdl:
            return Residual(embedding(token_ids, table.data, rounded, pdl=True))
        rows = functional.embedding(token_ids, table.data)
        return Residual(rows if scale == 1.0 else rows.mul_(rounded))

    def norm_linear(self, x: Residual, norm: Norm, weight: Weight) -> Tensor:
        if weight.scales is not None:
            return self._of_codes(weight).norm_linear(x, norm, weight)
        plan = self._plan(Fusion.NORM, weight.num_out, x.rows)
        return self._linear.norm_linear(plan, x, norm, weight, x.rows.dtype)

    def attention(self, qkv: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        return self._attention(weights).attend(qkv, weights, layer_id, batch)

    def attention_of_last(self, qkv: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        return self._attention(weights).attend_last(qkv, weights, layer_id, batch)

    def latent_attention(
        self, q: Tensor, kv: Tensor, weights: LatentWeights, layer_id: int, batch: ForwardBatch
    ) -> Tensor:
        return self._latent(weights).attend(q, kv, weights, layer_id, batch)

    def latent_attention_of_last(
        self, q: Tensor, kv: Tensor, weights: LatentWeights, layer_id: int, batch: ForwardBatch
    ) -> Tensor:
        return self._latent(weights).attend_last(q, kv, weights, layer_id, batch)

    def delta_rule(self, x: Tensor, weights: DeltaWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        states, work = self.caches[weights.group].blocks[:, layer_id, 0, 0], batch.work[weights.group]
        assert isinstance(work, StateWork), "a step begins with `begin`"
        table = batch.block_tables[weights.group]
        sequences = Sequences(table, batch.cu_seqlens, batch.seq_lens, work.is_new, batch.one_token_each)
        if batch.one_token_each:
            heads, gates = convolve(x, weights, states, sequences, pdl=self.pdl)
            mixed = recur(heads, gates, weights, states, sequences, pdl=self.pdl)
        else:
            mixed = self._mix_prompts(x, weights, states, sequences)
        return gated_norm(mixed, x, weights, sequences, pdl=self.pdl)

    def _mix_prompts(self, x: Tensor, weights: DeltaWeights, states: Tensor, sequences: Sequences) -> Tensor:
        """Return the delta rule's outputs `[num_tokens, value_heads, value_dim]`: by chunks where their tiles fit."""
        heads, gates = convolve_prompts(x, weights, states, sequences)
        if not is_scannable(heads):
            return recur(heads, gates, weights, states, sequences)
        overlaps = find_overlaps(heads, gates, weights, sequences)
        return scan_chunks(heads, overlaps, weights, states, sequences, gpu_of(x.device))

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.float().sigmoid().to(x.dtype)

    def _attention(self, weights: AttentionWeights) -> CudaAttention:
        group = self.groups[weights.group]
        assert isinstance(group, CudaAttention), f"group {weights.group} has no keys and values"
        return group

    def _latent(self, weights: LatentWeights) -> CudaLatent:
        group = self.groups[weights.group]
        assert isinstance(group, CudaLatent), f"group {weights.group} has no latents"
        return group

    def linear_add(self, x: Tensor, weight: Weight, residual: Residual) -> Residual:
        if weight.scales is not None:
            return self._of_codes(weight).linear_add(x, weight, residual)
        plan = self._plan(Fusion.ADD, weight.num_out, x)
        return self._linear.linear_add(plan, x, weight, residual)

    def linear_norm_add(
        self, x: Tensor, weight: Weight, norm: Norm, residual: Residual, scale: Tensor | None = None
    ) -> Residual:
        if weight.scales is not None:
            parts = self._of_codes(weight).parts(x, weight)
        else:
            parts = self._linear.parts(self._plan(Fusion.ADD, weight.num_out, x), x, weight)
        return self._linear.norm_add(parts, norm, residual, scale)

    def norm_add(self, x: Tensor, norm: Norm, residual: Residual, scale: Tensor | None = None) -> Residual:
        return self._linear.norm_add(x[None], norm, residual, scale)

    def norm_gate_up(
        self, x: Residual, norm: Norm, gate_up: Weight, activation: Activation = Activation.SILU
    ) -> Tensor:
        if gate_up.scales is not None:
            return self._of_codes(gate_up).norm_gate_up(x, norm, gate_up, activation)
        plan = self._plan(Fusion.GATE, gate_up.num_out // 2, x.rows)
        return self._linear.norm_gate_up(plan, x, norm, gate_up, activation)

    def norm(self, x: Residual, norm: Norm) -> Tensor:
        return self._linear.normed(x, norm)

    def norm_route(self, x: Residual, norm: Norm, router: Router, present: Tensor) -> tuple[Tensor, Routing]:
        if self.kernels.norm == "triton" and (fused := self._experts.norm_route(x, norm, router, present)) is not None:
            return fused
        normed = self.norm(x, norm)
        return normed, self._experts.route(normed, router, present)

    def experts_add(self, x: Tensor, routing: Routing, weights: ExpertWeights, residual: Residual) -> Residual:
        return self._experts.add(x, routing, weights, residual)

    def experts_norm_add(
        self, x: Tensor, routing: Routing, weights: ExpertWeights, norm: Norm, residual: Residual
    ) -> Residual:
        total = self._experts.add(x, routing, weights, Residual(torch.zeros_like(x)))
        parts = total.rows[None] if total.parts is None else total.parts
        return self._linear.norm_add(parts, norm, residual, None)

    def logits(self, x: Residual, norm: Norm, weight: Weight, cap: float = 0.0) -> Tensor:
        if weight.scales is not None:
            logits = self._of_codes(weight).logits(x, norm, weight)
        else:
            plan = self._plan(Fusion.LOGITS, weight.num_out, x.rows)
            logits = self._linear.norm_linear(plan, x, norm, weight, torch.float32)
        return cap_logits(logits, cap, pdl=self.pdl) if cap else logits

    def _plan(self, fusion: Fusion, n: int, x: Tensor) -> Plan:
        return self.plans.plan(fusion, x.shape[0], n, x.shape[1]) if self._is_planned else Plan(Kind.CUBLAS)
