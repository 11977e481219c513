"""Products with weight matrices on a GPU, with what surrounds them: the plan says which kernels."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from common.kernels.gemv import gemv
from common.kernels.join_parts import join_norm, join_parts
from common.kernels.rms_norm import rms_norm
from common.kernels.silu_mul import silu_mul
from common.kernels.skinny_gemm import skinny_gemm
from common.ops.base import Residual
from common.ops.linear_plan import Kind, Plan

Norm = Callable[[Tensor, Tensor, float], Tensor]
SiluMul = Callable[[Tensor], Tensor]


class FusedLinear:
    """Runs plans.

    Args:
        norm, activation: the implementations for where they are not fused into a product.
    """

    def __init__(self, *, norm: Norm = rms_norm, activation: SiluMul = silu_mul) -> None:
        self.norm = norm
        self.activation = activation

    def norm_linear(
        self, plan: Plan, x: Residual, norm: Tensor, eps: float, weight: Tensor, out_dtype: torch.dtype, pdl: bool
    ) -> Tensor:
        """`rms_norm(x) @ weight.T`: `[num_tokens, n]`."""
        if plan.kind is Kind.GEMV:
            values = settled(x, pdl)
            out = torch.empty((values.shape[0], weight.shape[0]), dtype=out_dtype, device=values.device)
            return gemv(values, weight, out, norm=norm, eps=eps, pdl=pdl, **plan.gemv_tiles)
        y = self._normed(x, norm, eps, pdl)
        if plan.kind is Kind.SKINNY:
            out = torch.empty((y.shape[0], weight.shape[0]), dtype=out_dtype, device=y.device)
            return _skinny(plan, y, weight, out, pdl=pdl)
        return functional.linear(y, weight) if out_dtype == y.dtype else torch.mm(y, weight.t(), out_dtype=out_dtype)

    def linear_add(self, plan: Plan, x: Tensor, weight: Tensor, residual: Residual, pdl: bool) -> Residual:
        """`residual + x @ weight.T`, in the memory of `residual`; parts of the product may still have to be added."""
        values = settled(residual, pdl)
        if plan.kind is Kind.GEMV:
            return Residual(gemv(x, weight, values, residual=values, pdl=pdl, **plan.gemv_tiles))
        if plan.kind is Kind.CUBLAS:
            return Residual(torch.addmm(values, x, weight.t(), out=values))
        if plan.splits == 1:
            return Residual(_skinny(plan, x, weight, values, residual=values, pdl=pdl))
        return Residual(values, _parts(plan, x, weight, (x.shape[0], weight.shape[0]), pdl=pdl))

    def norm_gate_up(self, plan: Plan, x: Residual, norm: Tensor, eps: float, gate_up: Tensor, pdl: bool) -> Tensor:
        """`silu(g) * u` of `rms_norm(x) @ gate_up.T`: `[num_tokens, inner]`."""
        if plan.kind is Kind.CUBLAS:
            return self.activation(functional.linear(self._normed(x, norm, eps, pdl), gate_up))
        out = torch.empty((x.values.shape[0], gate_up.shape[0] // 2), dtype=x.values.dtype, device=x.values.device)
        if plan.kind is Kind.GEMV:
            return gemv(settled(x, pdl), gate_up, out, norm=norm, eps=eps, gated=True, pdl=pdl, **plan.gemv_tiles)
        return _skinny(plan, self._normed(x, norm, eps, pdl), gate_up, out, gated=True, pdl=pdl)

    def _normed(self, x: Residual, norm: Tensor, eps: float, pdl: bool) -> Tensor:
        """The norm of the stream, to which its parts are added on the way."""
        if x.parts is not None:
            parts, x.parts = x.parts, None
            return join_norm(parts, x.values, norm, eps, pdl=pdl)
        return rms_norm(x.values, norm, eps, pdl=pdl) if self.norm is rms_norm else self.norm(x.values, norm, eps)


def settled(x: Residual, pdl: bool) -> Tensor:
    """The values of the stream with nothing left to be added."""
    if x.parts is not None:
        join_parts(x.parts, x.values, residual=x.values, pdl=pdl)
        x.parts = None
    return x.values


def _skinny(
    plan: Plan, x: Tensor, weight: Tensor, out: Tensor, *,
    residual: Tensor | None = None, gated: bool = False, pdl: bool,
) -> Tensor:  # fmt: skip
    if plan.splits > 1:
        num_tokens, n = out.shape
        parts = _parts(plan, x, weight, (2, num_tokens, n) if gated else (num_tokens, n), gated=gated, pdl=pdl)
        return join_parts(parts, out, gated=gated, pdl=pdl)
    return skinny_gemm(x, weight, out, residual=residual, gated=gated, pdl=pdl, **plan.skinny_tiles)


def _parts(plan: Plan, x: Tensor, weight: Tensor, shape: tuple[int, ...], *, gated: bool = False, pdl: bool) -> Tensor:
    """The parts of a split product; in a captured graph this is the graph's own memory."""
    parts = torch.empty((plan.splits, *shape), dtype=torch.float32, device=x.device)
    return skinny_gemm(x, weight, parts, splits=plan.splits, gated=gated, pdl=pdl, **plan.skinny_tiles)
