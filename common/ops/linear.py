"""Products with weight matrices on a GPU, fused with norm, residual and gate; a plan chooses the kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from common.kernels.elementwise.gate_mul import gate_mul
from common.kernels.elementwise.norm_add import norm_add
from common.kernels.elementwise.rms_norm import rms_norm
from common.kernels.products.gated_gemm import gated_gemm
from common.kernels.products.gemv import gemv
from common.kernels.products.join_parts import join_parts
from common.kernels.products.ring_gemm import ring_gemm
from common.kernels.products.skinny_gemm import skinny_gemm
from common.ops.base import Activation, Norm, Residual, Weight
from common.ops.linear_plan import Kind, Plan

RMSNorm = Callable[[Tensor, Tensor, float], Tensor]
GateMul = Callable[[Tensor, Activation], Tensor]


class FusedLinear:
    """Runs plans for products.

    Args:
        norm: replaces the norm kernel where the norm is not fused into a product; None for the kernel.
        gate: computes `activation(gate) * up` where the gate is not fused into a product.
        pdl: launch kernels before their predecessors have finished.
    """

    def __init__(self, *, norm: RMSNorm | None = None, gate: GateMul = gate_mul, pdl: bool = False) -> None:
        self.norm = norm
        self.gate = gate
        self.pdl = pdl

    def norm_linear(self, plan: Plan, x: Residual, norm: Norm, weight: Weight, out_dtype: torch.dtype) -> Tensor:
        """Return `rms_norm(x) @ weight.T`, of a weight without bias: `[num_tokens, n]`."""
        matrix = _without_bias(weight)
        if plan.kind is Kind.CUBLAS:
            y = self.normed(x, norm)
            if out_dtype == y.dtype:
                return functional.linear(y, matrix)
            return torch.mm(y, matrix.t(), out_dtype=out_dtype)
        out = torch.empty((x.rows.shape[0], weight.num_out), dtype=out_dtype, device=matrix.device)
        if plan.kind is Kind.GEMV:
            rows = self.whole(x)
            return gemv(rows, matrix, out, norm=norm.weight, eps=norm.eps, pdl=self.pdl, **plan.gemv_tiles)
        return self._product(plan, self.normed(x, norm), weight, out)

    def linear_add(self, plan: Plan, x: Tensor, weight: Weight, residual: Residual) -> Residual:
        """Return `residual + x @ weight.T`, in the memory of `residual`; if K is split, the next norm adds up parts."""
        rows, matrix, bias = residual.rows, weight.data, weight.bias
        if plan.kind is Kind.CUBLAS:
            if bias is not None:
                return Residual(rows.add_(functional.linear(x, matrix, bias)))
            return Residual(torch.addmm(rows, x, matrix.t(), out=rows))
        if plan.kind is Kind.GEMV:
            return Residual(gemv(x, matrix, rows, residual=rows, bias=bias, pdl=self.pdl, **plan.gemv_tiles))
        if plan.splits == 1:
            return Residual(self._product(plan, x, weight, rows, residual=rows))
        # In a captured graph, memory of the graph's own pool.
        parts = torch.empty((plan.splits, *rows.shape), dtype=torch.float32, device=x.device)
        return Residual(rows, self._product(plan, x, weight, parts))

    def norm_add(self, parts: Tensor, norm: Norm, residual: Residual, scale: Tensor | None) -> Residual:
        """Return `(residual + rms_norm(sum of parts)) * scale`, in the memory of `residual` if the kernel adds."""
        rows = residual.rows
        if self.norm is None:
            return Residual(norm_add(parts, norm.weight, norm.eps, rows, scale=scale, pdl=self.pdl))
        added = rows + self.norm(parts.sum(0, dtype=torch.float32), norm.weight, norm.eps)
        return Residual((added if scale is None else added * scale).to(rows.dtype))

    def norm_gate_up(self, plan: Plan, x: Residual, norm: Norm, gate_up: Weight, activation: Activation) -> Tensor:
        """Return `activation(g) * u` of `rms_norm(x) @ gate_up.T`, of a weight without bias: `[num_tokens, inner]`."""
        matrix = _without_bias(gate_up)
        if plan.kind is Kind.CUBLAS:
            return self.gate(functional.linear(self.normed(x, norm), matrix), activation)
        if plan.kind is Kind.GATED:
            return gated_gemm(self.normed(x, norm), matrix, activation.value)
        out = torch.empty((x.rows.shape[0], gate_up.num_out // 2), dtype=matrix.dtype, device=matrix.device)
        if plan.kind is Kind.GEMV:
            rows, tiles, gate = self.whole(x), plan.gemv_tiles, activation.value
            return gemv(rows, matrix, out, norm=norm.weight, eps=norm.eps, activation=gate, pdl=self.pdl, **tiles)
        return self._product(plan, self.normed(x, norm), gate_up, out, activation=activation.value)

    def whole(self, x: Residual) -> Tensor:
        """Return the rows, with the parts added in place."""
        return x.rows if x.parts is None else join_parts(x.parts, x.rows, pdl=self.pdl)

    def normed(self, x: Residual, norm: Norm, *, ahead: bool = False) -> Tensor:
        """Return the normed rows, after the parts are added in place; `ahead` as for `rms_norm`."""
        if self.norm is None:
            return rms_norm(x.rows, norm.weight, norm.eps, parts=x.parts, ahead=ahead, pdl=self.pdl)
        return self.norm(self.whole(x), norm.weight, norm.eps)

    def parts(self, plan: Plan, x: Tensor, weight: Weight) -> Tensor:
        """Return the product alone, in parts to be added up: `[splits, num_tokens, n]`."""
        if plan.kind is Kind.CUBLAS:
            return functional.linear(x, weight.data, weight.bias)[None]
        parts = torch.empty((plan.splits or 1, x.shape[0], weight.num_out), dtype=torch.float32, device=x.device)
        if plan.kind is Kind.GEMV:
            gemv(x, weight.data, parts[0], bias=weight.bias, pdl=self.pdl, **plan.gemv_tiles)
        else:
            self._product(plan, x, weight, parts if len(parts) > 1 else parts[0])
        return parts

    def _product(
        self,
        plan: Plan,
        x: Tensor,
        weight: Weight,
        out: Tensor,
        *,
        residual: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        """Multiply a few tokens; `out` has a plane for each of `plan.splits`, if there are several."""
        splits = out.shape[0] if out.dim() == 3 else 1
        ending: Any = {"residual": residual, "bias": weight.bias, "activation": activation}
        if plan.kind is Kind.RING:
            return ring_gemm(x, weight.data, out, splits=splits, **ending, pdl=self.pdl, **plan.ring_tiles)
        return skinny_gemm(x, weight.data, out, splits=splits, **ending, pdl=self.pdl, **plan.skinny_tiles)


def _without_bias(weight: Weight) -> Tensor:
    assert weight.bias is None, "products behind a norm have no bias"
    return weight.data
