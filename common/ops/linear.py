"""Products with weight matrices on a GPU, with what surrounds them: the plan says which kernels."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from common.kernels.gemv import gemv
from common.kernels.rms_norm import rms_norm
from common.kernels.silu_mul import silu_mul
from common.kernels.skinny_gemm import skinny_gemm
from common.ops.linear_plan import Kind, Plan

Norm = Callable[[Tensor, Tensor, float], Tensor]
SiluMul = Callable[[Tensor], Tensor]


class FusedLinear:
    """Runs plans.

    Args:
        norm, activation: the implementations for where they are not fused into a product.
        pdl: launch with programmatic dependence; for kernels that are captured in a graph.
    """

    def __init__(self, *, norm: Norm = rms_norm, activation: SiluMul = silu_mul) -> None:
        self.norm = norm
        self.activation = activation

    def norm_linear(
        self, plan: Plan, x: Tensor, norm: Tensor, eps: float, weight: Tensor, out_dtype: torch.dtype, pdl: bool
    ) -> Tensor:
        """`rms_norm(x) @ weight.T`: `[num_tokens, n]`."""
        if plan.kind is Kind.CUBLAS:
            y = self.norm(x, norm, eps)
            return (
                functional.linear(y, weight) if out_dtype == x.dtype else torch.mm(y, weight.t(), out_dtype=out_dtype)
            )
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
        if plan.kind is Kind.GEMV:
            return gemv(
                x, weight, out, rows=plan.rows, warps=plan.warps, unroll=plan.unroll, norm=norm, eps=eps, pdl=pdl
            )
        return self._skinny(plan, rms_norm(x, norm, eps, pdl=pdl), weight, out, pdl=pdl)

    def linear_add(self, plan: Plan, x: Tensor, weight: Tensor, residual: Tensor, pdl: bool) -> Tensor:
        """`residual + x @ weight.T`, in the memory of `residual`."""
        if plan.kind is Kind.CUBLAS:
            return torch.addmm(residual, x, weight.t(), out=residual)
        if plan.kind is Kind.GEMV:
            return gemv(
                x, weight, residual, rows=plan.rows, warps=plan.warps, unroll=plan.unroll, residual=residual, pdl=pdl
            )
        return self._skinny(plan, x, weight, residual, residual=residual, pdl=pdl)

    def norm_gate_up(self, plan: Plan, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor, pdl: bool) -> Tensor:
        """`silu(g) * u` of `rms_norm(x) @ gate_up.T`: `[num_tokens, inner]`."""
        if plan.kind is Kind.CUBLAS:
            return self.activation(functional.linear(self.norm(x, norm, eps), gate_up))
        out = torch.empty((x.shape[0], gate_up.shape[0] // 2), dtype=x.dtype, device=x.device)
        if plan.kind is Kind.GEMV:
            return gemv(
                x,
                gate_up,
                out,
                rows=plan.rows,
                warps=plan.warps,
                unroll=plan.unroll,
                norm=norm,
                eps=eps,
                gated=True,
                pdl=pdl,
            )
        return self._skinny(plan, rms_norm(x, norm, eps, pdl=pdl), gate_up, out, gated=True, pdl=pdl)

    def _skinny(
        self, plan: Plan, x: Tensor, weight: Tensor, out: Tensor, *,
        residual: Tensor | None = None, gated: bool = False, pdl: bool,
    ) -> Tensor:  # fmt: skip
        parts = None
        if plan.splits > 1:  # in a captured graph this is the graph's own memory
            parts = torch.empty(plan.splits * x.shape[0] * weight.shape[0], dtype=torch.float32, device=x.device)
        return skinny_gemm(
            x, weight, out, block_n=plan.block_n, block_k=plan.block_k, splits=plan.splits, stages=plan.stages,
            warps=plan.warps, parts=parts, residual=residual, gated=gated, pdl=pdl,
        )  # fmt: skip
