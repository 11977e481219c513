"""Products with weight matrices on a GPU, fused with norm, residual and gate; a plan chooses the kernels."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from common.kernels.elementwise.rms_norm import rms_norm
from common.kernels.elementwise.silu_mul import silu_mul
from common.kernels.products.gated_gemm import gated_gemm
from common.kernels.products.gemv import gemv
from common.kernels.products.join_parts import join_parts
from common.kernels.products.ring_gemm import ring_gemm
from common.kernels.products.skinny_gemm import skinny_gemm
from common.ops.base import Residual
from common.ops.linear_plan import Kind, Plan

Norm = Callable[[Tensor, Tensor, float], Tensor]
SiluMul = Callable[[Tensor], Tensor]


class FusedLinear:
    """Runs plans for products.

    Args:
        norm: replaces the norm kernel where the norm is not fused into a product; None for the kernel.
        activation: computes SiLU(gate) * up where the gate is not fused into a product.
    """

    def __init__(self, *, norm: Norm | None = None, activation: SiluMul = silu_mul) -> None:
        self.norm = norm
        self.activation = activation

    def norm_linear(
        self, plan: Plan, x: Residual, norm: Tensor, eps: float, weight: Tensor, out_dtype: torch.dtype, pdl: bool
    ) -> Tensor:
        """Return `rms_norm(x) @ weight.T`: `[num_tokens, n]`."""
        if plan.kind is Kind.CUBLAS:
            y = self._normed(x, norm, eps, pdl)
            return (
                functional.linear(y, weight) if out_dtype == y.dtype else torch.mm(y, weight.t(), out_dtype=out_dtype)
            )
        out = torch.empty((x.rows.shape[0], weight.shape[0]), dtype=out_dtype, device=weight.device)
        if plan.kind is Kind.GEMV:
            return gemv(self.whole(x, pdl), weight, out, norm=norm, eps=eps, pdl=pdl, **plan.gemv_tiles)
        return _product(plan, self._normed(x, norm, eps, pdl), weight, out, pdl=pdl)

    def linear_add(self, plan: Plan, x: Tensor, weight: Tensor, residual: Residual, pdl: bool) -> Residual:
        """Return `residual + x @ weight.T`, in the memory of `residual`; if K is split, the next norm adds up parts."""
        rows = residual.rows
        if plan.kind is Kind.CUBLAS:
            return Residual(torch.addmm(rows, x, weight.t(), out=rows))
        if plan.kind is Kind.GEMV:
            return Residual(gemv(x, weight, rows, residual=rows, pdl=pdl, **plan.gemv_tiles))
        if plan.splits == 1:
            return Residual(_product(plan, x, weight, rows, residual=rows, pdl=pdl))
        # In a captured graph, memory of the graph's own pool.
        parts = torch.empty((plan.splits, *rows.shape), dtype=torch.float32, device=x.device)
        return Residual(rows, _product(plan, x, weight, parts, splits=plan.splits, pdl=pdl))

    def norm_gate_up(self, plan: Plan, x: Residual, norm: Tensor, eps: float, gate_up: Tensor, pdl: bool) -> Tensor:
        """Return `silu(g) * u` of `rms_norm(x) @ gate_up.T`: `[num_tokens, inner]`."""
        if plan.kind is Kind.CUBLAS:
            return self.activation(functional.linear(self._normed(x, norm, eps, pdl), gate_up))
        if plan.kind is Kind.GATED:
            return gated_gemm(self._normed(x, norm, eps, pdl), gate_up)
        out = torch.empty((x.rows.shape[0], gate_up.shape[0] // 2), dtype=gate_up.dtype, device=gate_up.device)
        if plan.kind is Kind.GEMV:
            rows = self.whole(x, pdl)
            return gemv(rows, gate_up, out, norm=norm, eps=eps, gated=True, pdl=pdl, **plan.gemv_tiles)
        return _product(plan, self._normed(x, norm, eps, pdl), gate_up, out, gated=True, pdl=pdl)

    def whole(self, x: Residual, pdl: bool) -> Tensor:
        """Return the rows, with the parts added in place."""
        return x.rows if x.parts is None else join_parts(x.parts, x.rows, pdl=pdl)

    def _normed(self, x: Residual, norm: Tensor, eps: float, pdl: bool) -> Tensor:
        if self.norm is None:
            return rms_norm(x.rows, norm, eps, parts=x.parts, pdl=pdl)
        return self.norm(self.whole(x, pdl), norm, eps)


def _product(
    plan: Plan, x: Tensor, weight: Tensor, out: Tensor, *,
    splits: int = 1, residual: Tensor | None = None, gated: bool = False, pdl: bool,
) -> Tensor:  # fmt: skip
    if plan.kind is Kind.RING:
        return ring_gemm(x, weight, out, splits=splits, residual=residual, gated=gated, pdl=pdl, **plan.ring_tiles)
    return skinny_gemm(x, weight, out, splits=splits, residual=residual, gated=gated, pdl=pdl, **plan.skinny_tiles)
