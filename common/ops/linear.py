"""Products with weight matrices on a GPU, with what surrounds them: the plan says which kernels."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from common.kernels.gemv import gemv
from common.kernels.join_parts import join_parts
from common.kernels.ring_gemm import RingWorkspace, ring_gemm
from common.kernels.rms_norm import rms_norm
from common.kernels.silu_mul import silu_mul
from common.kernels.skinny_gemm import skinny_gemm
from common.ops.linear_plan import Kind, Plan

Norm = Callable[[Tensor, Tensor, float], Tensor]
SiluMul = Callable[[Tensor], Tensor]


class FusedLinear:
    """Runs plans.

    Args:
        norm: stands in for the kernel where the norm is not fused into a product; None for the kernel itself.
        activation: the same of SiLU(gate) * up.
    """

    def __init__(self, *, norm: Norm | None = None, activation: SiluMul = silu_mul) -> None:
        self.norm = norm
        self.activation = activation
        self._workspace: RingWorkspace | None = None

    def norm_linear(
        self, plan: Plan, x: Tensor, norm: Tensor, eps: float, weight: Tensor, out_dtype: torch.dtype, pdl: bool
    ) -> Tensor:
        """`rms_norm(x) @ weight.T`: `[num_tokens, n]`."""
        if plan.kind is Kind.CUBLAS:
            y = self._normed(x, norm, eps, pdl)
            return (
                functional.linear(y, weight) if out_dtype == x.dtype else torch.mm(y, weight.t(), out_dtype=out_dtype)
            )
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
        return self._fused(plan, x, weight, out, norm=norm, eps=eps, pdl=pdl)

    def linear_add(self, plan: Plan, x: Tensor, weight: Tensor, residual: Tensor, pdl: bool) -> Tensor:
        """`residual + x @ weight.T`, in the memory of `residual`."""
        if plan.kind is Kind.CUBLAS:
            return torch.addmm(residual, x, weight.t(), out=residual)
        return self._fused(plan, x, weight, residual, residual=residual, pdl=pdl)

    def norm_gate_up(self, plan: Plan, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor, pdl: bool) -> Tensor:
        """`silu(g) * u` of `rms_norm(x) @ gate_up.T`: `[num_tokens, inner]`."""
        if plan.kind is Kind.CUBLAS:
            return self.activation(functional.linear(self._normed(x, norm, eps, pdl), gate_up))
        out = torch.empty((x.shape[0], gate_up.shape[0] // 2), dtype=x.dtype, device=x.device)
        return self._fused(plan, x, gate_up, out, norm=norm, eps=eps, gated=True, pdl=pdl)

    def _normed(self, x: Tensor, norm: Tensor, eps: float, pdl: bool) -> Tensor:
        return rms_norm(x, norm, eps, pdl=pdl) if self.norm is None else self.norm(x, norm, eps)

    def _fused(
        self, plan: Plan, x: Tensor, weight: Tensor, out: Tensor, *, norm: Tensor | None = None, eps: float = 0.0,
        residual: Tensor | None = None, gated: bool = False, pdl: bool,
    ) -> Tensor:  # fmt: skip
        """One of our own kernels; the norm goes ahead of those that do not hold it."""
        if norm is not None and not _holds_norm(plan, x):
            x, norm = rms_norm(x, norm, eps, pdl=pdl), None
        match plan.kind:
            case Kind.GEMV:
                return gemv(
                    x, weight, out, norm=norm, eps=eps, residual=residual, gated=gated, pdl=pdl, **plan.gemv_tiles
                )
            case Kind.RING:
                return ring_gemm(
                    x, weight, out, self._ring_workspace(x.device), splits=plan.splits, norm=norm, eps=eps,
                    residual=residual, gated=gated, pdl=pdl, **plan.ring_tiles,
                )  # fmt: skip
            case _:
                return _skinny(plan, x, weight, out, residual=residual, gated=gated, pdl=pdl)

    def _ring_workspace(self, device: torch.device) -> RingWorkspace:
        """Made by the first product, which runs before any graph is captured."""
        if self._workspace is None:
            self._workspace = RingWorkspace(device)
        return self._workspace


def _holds_norm(plan: Plan, x: Tensor) -> bool:
    return plan.kind is Kind.GEMV or (plan.kind is Kind.RING and x.dtype is torch.bfloat16)


def _skinny(
    plan: Plan, x: Tensor, weight: Tensor, out: Tensor, *, residual: Tensor | None, gated: bool, pdl: bool
) -> Tensor:
    if plan.splits == 1:
        return skinny_gemm(x, weight, out, residual=residual, gated=gated, pdl=pdl, **plan.skinny_tiles)
    num_tokens, n = out.shape
    shape = (plan.splits, 2, num_tokens, n) if gated else (plan.splits, num_tokens, n)
    parts = torch.empty(shape, dtype=torch.float32, device=x.device)  # in a captured graph, the graph's own memory
    skinny_gemm(x, weight, parts, splits=plan.splits, gated=gated, pdl=pdl, **plan.skinny_tiles)
    return join_parts(parts, out, residual=residual, gated=gated, pdl=pdl)
