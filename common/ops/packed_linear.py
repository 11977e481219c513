"""Products with matrices of codes on a GPU, activations as they are, fused with norm, residual and gate.

A few tokens are multiplied by codes that are widened in registers. For many tokens the matrix is widened in memory, and
multiplied as a plain matrix is. This memory is free again behind the product, so that the next one takes the same.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from common.kernels.base.gpu import gpu_of
from common.kernels.products.packed_checks import NAMES
from common.kernels.products.packed_gemm import packed_gemm
from common.kernels.products.packed_ring import makes_elements, packed_ring
from common.kernels.products.widen import widen
from common.ops import reference
from common.ops.base import BLOCK, Activation, Norm, Residual, Weight
from common.ops.base.weight import WEIGHT_ONLY
from common.ops.linear import FusedLinear
from common.ops.linear_plan import Fusion, Kind, Plan, Plans, packed_of_thumb

IN_CODES = (Kind.PACKED, Kind.RING)  # kernels that take a matrix as it is
FEW_TOKENS = 8  # multiplied at once by an instruction of `packed_gemm`
WIDENED_ELEMENTS = 16 * 1024 * 1024
"""Of the matrix of logits, which has too many rows to be widened at once."""


class PackedLinear:
    """Runs products of matrices in weight-only schemes.

    Args:
        linear: what norms, multiplies plain matrices, and adds parts to the residual stream.
        plans: None for the reference, whatever the size.
    """

    def __init__(self, linear: FusedLinear, plans: Plans | None) -> None:
        self._linear, self.plans = linear, plans

    def norm_linear(self, x: Residual, norm: Norm, weight: Weight) -> Tensor:
        """Return `rms_norm(x) @ weight.T`, of a weight without bias: `[num_tokens, n]`."""
        if self.plans is None:
            return reference.linear(self._linear.normed(x, norm), weight)
        plan = self._plan(Fusion.NORM, weight.num_out, x.rows, weight)
        if plan.kind not in IN_CODES:
            return self._linear.norm_linear(plan, x, norm, _widened(weight), x.rows.dtype)
        return self._normed_product(plan, x, norm, weight, x.rows.dtype)

    def logits(self, x: Residual, norm: Norm, weight: Weight) -> Tensor:
        """Return `rms_norm(x) @ weight.T` as fp32, of a weight without bias: `[num_tokens, vocab]`."""
        if self.plans is None:
            return reference.linear(self._linear.normed(x, norm), weight).float()
        plan = self._plan(Fusion.LOGITS, weight.num_out, x.rows, weight)
        if plan.kind in IN_CODES:
            return self._normed_product(plan, x, norm, weight, torch.float32)
        y, each = self._linear.normed(x, norm), max(WIDENED_ELEMENTS // weight.num_in, 1)
        out = torch.empty((y.shape[0], weight.num_out), dtype=torch.float32, device=y.device)
        for begin in range(0, weight.num_out, each):
            some = _widened(_rows_of(weight, slice(begin, begin + each))).data.t()
            product = y @ some if y.dtype == out.dtype else torch.mm(y, some, out_dtype=out.dtype)
            out[:, begin : begin + each] = product
        return out

    def _normed_product(self, plan: Plan, x: Residual, norm: Norm, weight: Weight, out_dtype: torch.dtype) -> Tensor:
        out = torch.empty((x.rows.shape[0], weight.num_out), dtype=out_dtype, device=x.rows.device)
        if x.rows.shape[0] == 1:
            return self._product(plan, self._linear.whole(x), weight, out, norm=norm)
        return self._product(plan, self._linear.normed(x, norm, ahead=True), weight, out)

    def linear_add(self, x: Tensor, weight: Weight, residual: Residual) -> Residual:
        """Return `residual + x @ weight.T`, in the memory of `residual`; if K is split, the next norm adds up parts."""
        rows = residual.rows
        if self.plans is None:
            return Residual(rows.add_(reference.linear(x, weight)))
        plan = self._plan(Fusion.ADD, weight.num_out, x, weight)
        if plan.kind not in IN_CODES:
            return self._linear.linear_add(Plan(Kind.CUBLAS), x, _widened(weight), residual)
        if plan.splits == 1:
            return Residual(self._product(plan, x, weight, rows, residual=rows))
        return Residual(rows, self._parts(plan, x, weight))

    def norm_gate_up(self, x: Residual, norm: Norm, gate_up: Weight, activation: Activation) -> Tensor:
        """Return `activation(g) * u` of `rms_norm(x) @ gate_up.T`, of a weight without bias: `[num_tokens, inner]`."""
        if self.plans is None:
            return self._linear.gate(reference.linear(self._linear.normed(x, norm), gate_up), activation)
        num_tokens, inner = x.rows.shape[0], gate_up.num_out // 2
        plan = self._plan(Fusion.GATE, inner, x.rows, gate_up)
        if plan.kind not in IN_CODES:
            return self._linear.norm_gate_up(plan, x, norm, _widened(gate_up), activation)
        out = torch.empty((num_tokens, inner), dtype=x.rows.dtype, device=x.rows.device)
        if num_tokens == 1:
            return self._product(plan, self._linear.whole(x), gate_up, out, norm=norm, activation=activation)
        return self._product(plan, self._linear.normed(x, norm, ahead=True), gate_up, out, activation=activation)

    def parts(self, x: Tensor, weight: Weight) -> Tensor:
        """Return the product alone, in parts to be added up: `[splits, num_tokens, n]`."""
        if self.plans is None:
            return reference.linear(x, weight)[None]
        plan = self._plan(Fusion.ADD, weight.num_out, x, weight)
        if plan.kind not in IN_CODES:
            return self._linear.parts(Plan(Kind.CUBLAS), x, _widened(weight))
        return self._parts(plan, x, weight)

    def _parts(self, plan: Plan, x: Tensor, weight: Weight) -> Tensor:
        parts = torch.empty((plan.splits, x.shape[0], weight.num_out), dtype=torch.float32, device=x.device)
        self._product(plan, x, weight, parts if len(parts) > 1 else parts[0])
        return parts

    def _plan(self, fusion: Fusion, n: int, x: Tensor, weight: Weight) -> Plan:
        """Return a plan for codes; the plan of a plain matrix where that of codes is to widen them.

        Plans are made for large groups without offsets. Elements of narrow groups take `packed_ring` twice the
        instructions that FEW_TOKENS take `packed_gemm`. A wide slot does not fit in registers beside sums that offsets
        are multiplied by. No kernel multiplies tokens of 32 bits by codes.
        """
        assert self.plans is not None, "a choice of kernels"
        plan = self.plans.plan(fusion, x.shape[0], n, weight.num_in, weight.scheme)
        if x.dtype not in NAMES:
            plan = Plan(Kind.CUBLAS)
        if plan.kind is Kind.RING and _group(weight) < BLOCK and x.shape[0] <= FEW_TOKENS:
            bits, num_sms = WEIGHT_ONLY[weight.scheme], gpu_of(x.device).num_sms
            plan = packed_of_thumb(fusion, x.shape[0], n, weight.num_in, num_sms, bits)
        if plan.kind is Kind.RING and weight.offsets is not None:
            is_scaled = makes_elements(x.shape[0], _group(weight), is_gated=fusion is Fusion.GATE, has_offsets=True)
            plan = plan if is_scaled else _of_narrow_slots(plan)
        if plan.kind is Kind.CUBLAS and fusion is Fusion.GATE:
            plain = self.plans.plan(fusion, x.shape[0], n, weight.num_in)
            return plain if plain.kind is Kind.GATED else plan
        return plan

    def _product(
        self,
        plan: Plan,
        x: Tensor,
        weight: Weight,
        out: Tensor,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        """Multiply a few tokens; `out` has a plane for each of `plan.splits`, if there are several."""
        assert weight.scales is not None, "a matrix of codes"
        operands = x, weight.data, weight.scales, weight.offsets, weight.factors, out
        around: Any = {
            "norm": None if norm is None else norm.weight,
            "eps": 0.0 if norm is None else norm.eps,
            "splits": out.shape[0] if out.dim() == 3 else 1,
            "residual": residual,
            "bias": weight.bias,
            "activation": None if activation is None else activation.value,
            "pdl": self._linear.pdl,
        }
        if plan.kind is Kind.RING:
            return packed_ring(*operands, **around, **plan.packed_ring_tiles)
        return packed_gemm(*operands, **around, **plan.packed_tiles)


def _of_narrow_slots(plan: Plan) -> Plan:
    """Return a plan of rings with as many bytes in slots of a block."""
    more = plan.block_k // BLOCK
    return replace(plan, block_k=BLOCK, stages=plan.stages * more, token_stages=plan.token_stages * more)


def _group(weight: Weight) -> int:
    """Return the columns that share a scale."""
    assert weight.scales is not None, "a matrix of codes"
    return weight.num_in // weight.scales.shape[1]


def _widened(weight: Weight) -> Weight:
    """Return a plain matrix with a matrix's elements and bias."""
    assert weight.scales is not None, "a matrix of codes"
    out = torch.empty((weight.num_out, weight.num_in), dtype=weight.dtype, device=weight.data.device)
    return Weight(widen(weight.data, weight.scales, weight.offsets, weight.factors, out), weight.bias)


def _rows_of(weight: Weight, rows: slice) -> Weight:
    """Return rows of a matrix without bias."""
    assert weight.scales is not None, "a matrix of codes"
    offsets, factors = (None if each is None else each[rows] for each in (weight.offsets, weight.factors))
    return replace(weight, data=weight.data[rows], scales=weight.scales[rows], offsets=offsets, factors=factors)
