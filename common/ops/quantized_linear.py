"""Products with matrices of 8 bits on a GPU, fused with norm, residual and gate; a plan chooses the kernels.

A few tokens are quantized by a norm or by a kernel of their own, and multiplied in codes. A lone token is multiplied by
`quantized_gemv` and stays as it is: reading the matrix takes all of its time. For many tokens see `code_products`.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from common.kernels.base.codes import readable
from common.kernels.base.gpu import Gpu
from common.kernels.elementwise.quantize import quantize
from common.kernels.elementwise.rms_norm import quantized_rms_norm
from common.kernels.products.quantized_gemv import COLUMNS as GEMV_COLUMNS
from common.kernels.products.quantized_gemv import quantized_gemv
from common.kernels.products.quantized_ring import quantized_ring
from common.kernels.products.skinny_gemm import skinny_gemm
from common.ops import reference
from common.ops.base import BLOCK, Activation, Norm, Residual, Weight
from common.ops.code_products import Codes, multiply, multiply_in_parts
from common.ops.linear import FusedLinear
from common.ops.linear_plan import MAX_SKINNY_TOKENS, Fusion, Kind, Plan, Plans, rule_of_thumb

HEAD_TOKENS = MAX_SKINNY_TOKENS
"""Tokens that are multiplied by the matrix of logits at once."""


class QuantizedLinear:
    """Runs products of quantized matrices.

    Args:
        linear: what norms, gates, and adds parts to the residual stream.
        plans: None for the reference, whatever the size.
    """

    def __init__(self, linear: FusedLinear, gpu: Gpu, plans: Plans | None) -> None:
        self._linear, self._pdl, self.plans = linear, linear.pdl, plans
        self._gpu = gpu

    def norm_linear(self, x: Residual, norm: Norm, weight: Weight) -> Tensor:
        """Return `rms_norm(x) @ weight.T`, of a weight without bias: `[num_tokens, n]`."""
        plan, num_tokens = self._plan(Fusion.NORM, weight.num_out, x.rows, weight), x.rows.shape[0]
        if self.plans is None:
            return reference.linear(self._linear.normed(x, norm), weight)
        if plan.kind is Kind.CUBLAS:
            return multiply(self._normed(x, norm, weight), weight, self._gpu)
        out = torch.empty((num_tokens, weight.num_out), dtype=x.rows.dtype, device=x.rows.device)
        if plan.kind is Kind.GEMV:
            return self._gemv(plan, self._linear.whole(x), weight, out, norm=norm)
        return self._product(plan, self._normed(x, norm, weight), weight, out)

    def linear_add(self, x: Tensor, weight: Weight, residual: Residual) -> Residual:
        """Return `residual + x @ weight.T`, in the memory of `residual`; the next norm adds up any parts."""
        rows, plan = residual.rows, self._plan(Fusion.ADD, weight.num_out, x, weight)
        if self.plans is None:
            return Residual(rows.add_(reference.linear(x, weight)))
        if plan.kind is Kind.CUBLAS:
            return Residual(rows, multiply_in_parts(self._codes(x, weight), weight, self._gpu))
        if plan.kind is Kind.GEMV:
            return Residual(self._gemv(plan, x, weight, rows, residual=rows))
        if plan.splits == 1:
            return Residual(self._product(plan, self._codes(x, weight), weight, rows, residual=rows))
        return Residual(rows, self._parts(plan, x, weight))

    def norm_gate_up(self, x: Residual, norm: Norm, gate_up: Weight, activation: Activation) -> Tensor:
        """Return `activation(g) * u` of `rms_norm(x) @ gate_up.T`, of a weight without bias: `[num_tokens, inner]`."""
        inner = gate_up.num_out // 2
        plan, num_tokens = self._plan(Fusion.GATE, inner, x.rows, gate_up), x.rows.shape[0]
        if self.plans is None:
            return self._linear.gate(reference.linear(self._linear.normed(x, norm), gate_up), activation)
        if plan.kind is Kind.CUBLAS:
            return multiply(self._normed(x, norm, gate_up), gate_up, self._gpu, activation.value)
        out = torch.empty((num_tokens, inner), dtype=x.rows.dtype, device=x.rows.device)
        if plan.kind is Kind.GEMV:
            return self._gemv(plan, self._linear.whole(x), gate_up, out, norm=norm, activation=activation.value)
        return self._product(plan, self._normed(x, norm, gate_up), gate_up, out, activation=activation.value)

    def logits(self, x: Residual, norm: Norm, weight: Weight) -> Tensor:
        """Return `rms_norm(x) @ weight.T` in fp32: `[num_tokens, n]`.

        Libraries give 16 bits, or hold the matrix in 16 bits. So many tokens are multiplied HEAD_TOKENS at a time.
        """
        plan, num_tokens = self._plan(Fusion.LOGITS, weight.num_out, x.rows, weight), x.rows.shape[0]
        if self.plans is None:
            return reference.linear(self._linear.normed(x, norm), weight).float()
        if plan.kind is Kind.GEMV:
            out = torch.empty((num_tokens, weight.num_out), dtype=torch.float32, device=x.rows.device)
            return self._gemv(plan, self._linear.whole(x), weight, out, norm=norm)
        codes = self._normed(x, norm, weight)
        if plan.kind is Kind.CUBLAS:  # other counts would be other kernels, and prompts have any
            shape = (weight.num_out, weight.num_in, self._gpu, weight.scheme)
            plan, codes = rule_of_thumb(Fusion.LOGITS, HEAD_TOKENS, *shape), _padded(codes, -num_tokens % HEAD_TOKENS)
        num_rows = codes.data.shape[0]
        out = torch.empty((num_rows, weight.num_out), dtype=torch.float32, device=x.rows.device)
        for begin in range(0, num_rows, HEAD_TOKENS):
            some = slice(begin, begin + HEAD_TOKENS)
            self._product(plan, Codes(codes.data[some], codes.scales[some]), weight, out[some])
        return out[:num_tokens]

    def parts(self, x: Tensor, weight: Weight) -> Tensor:
        """Return the product alone, in parts to be added up: `[splits, num_tokens, n]`."""
        if self.plans is None:
            return reference.linear(x, weight)[None]
        plan = self._plan(Fusion.ADD, weight.num_out, x, weight)
        if plan.kind is Kind.CUBLAS:
            return multiply_in_parts(self._codes(x, weight), weight, self._gpu)
        return self._parts(plan, x, weight)

    def _parts(self, plan: Plan, x: Tensor, weight: Weight) -> Tensor:
        parts = torch.empty((plan.splits or 1, x.shape[0], weight.num_out), dtype=torch.float32, device=x.device)
        if plan.kind is Kind.GEMV:
            self._gemv(plan, x, weight, parts[0])
        else:
            self._product(plan, self._codes(x, weight), weight, parts if len(parts) > 1 else parts[0])
        return parts

    def _plan(self, fusion: Fusion, n: int, x: Tensor, weight: Weight) -> Plan:
        """Return a plan that suits the weight's scales and columns; plans are made for scales of rows."""
        if self.plans is None:
            return Plan(Kind.CUBLAS)
        plan = self.plans.plan(fusion, x.shape[0], n, weight.num_in, weight.scheme)
        if plan.kind is Kind.GEMV and weight.num_in % GEMV_COLUMNS:
            plan = self.plans.plan(fusion, 2, n, weight.num_in, weight.scheme)
        if weight.is_grouped and plan.kind is Kind.RING and plan.block_k != BLOCK:
            plan = replace(plan, block_k=BLOCK, stages=plan.stages * plan.block_k // BLOCK)
        return plan

    def _normed(self, x: Residual, norm: Norm, weight: Weight) -> Codes:
        """Return the normed rows in codes, after the parts are added in place."""
        dtype, options = weight.data.dtype, {"is_grouped": weight.is_grouped, "pdl": self._pdl}
        return Codes(*quantized_rms_norm(x.rows, norm.weight, norm.eps, dtype, parts=x.parts, **options))

    def _codes(self, x: Tensor, weight: Weight) -> Codes:
        return Codes(*quantize(x, weight.data.dtype, is_grouped=weight.is_grouped, pdl=self._pdl))

    def _gemv(
        self,
        plan: Plan,
        x: Tensor,
        weight: Weight,
        out: Tensor,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        assert weight.scales is not None, "a matrix of codes"
        return quantized_gemv(
            x,
            readable(weight.data, has_e4m3=self._gpu.has_e4m3),
            weight.scales,
            out,
            norm=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            residual=residual,
            bias=weight.bias,
            activation=activation,
            rows=plan.rows,
            warps=plan.warps,
            stages=plan.stages,
            pdl=self._pdl,
        )

    def _product(
        self,
        plan: Plan,
        x: Codes,
        weight: Weight,
        out: Tensor,
        *,
        residual: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        """Multiply a few tokens; `out` has a plane for each of `plan.splits`, if there are several."""
        assert weight.scales is not None, "a matrix of codes"
        splits = out.shape[0] if out.dim() == 3 else 1
        ending: Any = {"residual": residual, "bias": weight.bias, "activation": activation, "splits": splits}
        if plan.kind is Kind.RING:
            return quantized_ring(*x, weight.data, weight.scales, out, **ending, pdl=self._pdl, **plan.ring_tiles)
        scales: Any = {"x_scales": x.scales, "scales": weight.scales}
        return skinny_gemm(x.data, weight.data, out, **scales, **ending, pdl=self._pdl, **plan.skinny_tiles)


def _padded(codes: Codes, num_tokens: int) -> Codes:
    """Return codes with further tokens of zeros."""
    if not num_tokens:
        return codes
    data = functional.pad(codes.data.view(torch.int8), (0, 0, 0, num_tokens)).view(codes.data.dtype)
    return Codes(data, functional.pad(codes.scales.t(), (0, num_tokens)).t())
