"""Products with weight matrices on a GPU, fused with norm, residual and gate; a plan chooses the kernels."""

from typing import TypedDict

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
from common.ops import reference
from common.ops.base import Activation, Norm, Residual, Weight
from common.ops.linear_plan import Kind, Plan


class Neighbours(TypedDict):
    """What a product of a few tokens is fused with."""

    splits: int
    residual: Tensor | None
    activation: Activation | None
    pdl: bool


class FusedLinear:
    """Runs plans for products.

    Args:
        reference_norm: compute norms by the reference where they are not fused into a product.
        reference_gate: compute activations by the reference where they are not fused into a product.
        pdl: launch kernels before their predecessors have finished.
    """

    def __init__(self, *, reference_norm: bool = False, reference_gate: bool = False, pdl: bool = False) -> None:
        self._reference_norm = reference_norm
        self._reference_gate = reference_gate
        self.pdl = pdl

    def norm_linear(self, plan: Plan, x: Residual, norm: Norm, weight: Weight, out_dtype: torch.dtype) -> Tensor:
        """Return `rms_norm(x) @ weight.T`: `[num_tokens, n]`."""
        matrix = weight.data
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
        rows, matrix = residual.rows, weight.data
        if plan.kind is Kind.CUBLAS:
            return Residual(torch.addmm(rows, x, matrix.t(), out=rows))
        if plan.kind is Kind.GEMV:
            return Residual(gemv(x, matrix, rows, residual=rows, pdl=self.pdl, **plan.gemv_tiles))
        if plan.splits == 1:
            return Residual(self._product(plan, x, weight, rows, residual=rows))
        # In a captured graph, memory of the graph's own pool.
        parts = torch.empty((plan.splits, *rows.shape), dtype=torch.float32, device=x.device)
        return Residual(rows, self._product(plan, x, weight, parts))

    def linear_norm_add(
        self, plan: Plan, x: Tensor, weight: Weight, norm: Norm, residual: Residual, scale: Tensor | None
    ) -> Residual:
        """Return `(residual + rms_norm(x @ weight.T)) * scale`, in the memory of `residual`."""
        rows, parts = residual.rows, self._parts(plan, x, weight)
        if self._reference_norm:
            product = parts.float().sum(0).to(rows.dtype)
            return Residual(reference.norm_add(product, norm.weight, norm.eps, rows, scale))
        return Residual(norm_add(parts, norm.weight, norm.eps, rows, scale=scale, pdl=self.pdl))

    def norm_gate_up(
        self, plan: Plan, x: Residual, norm: Norm, gate_up: Weight, activation: Activation = Activation.SILU
    ) -> Tensor:
        """Return `activation(g) * u` of `rms_norm(x) @ gate_up.T`: `[num_tokens, inner]`."""
        matrix = gate_up.data
        if plan.kind is Kind.CUBLAS:
            product = functional.linear(self.normed(x, norm), matrix)
            return (reference.gate_mul if self._reference_gate else gate_mul)(product, activation)
        if plan.kind is Kind.GATED:
            return gated_gemm(self.normed(x, norm), matrix, activation)
        out = torch.empty((x.rows.shape[0], gate_up.num_out // 2), dtype=matrix.dtype, device=matrix.device)
        if plan.kind is Kind.GEMV:
            rows, tiles = self.whole(x), plan.gemv_tiles
            return gemv(rows, matrix, out, norm=norm.weight, eps=norm.eps, activation=activation, pdl=self.pdl, **tiles)
        return self._product(plan, self.normed(x, norm), gate_up, out, activation=activation)

    def whole(self, x: Residual) -> Tensor:
        """Return the rows, with the parts added in place."""
        return x.rows if x.parts is None else join_parts(x.parts, x.rows, pdl=self.pdl)

    def normed(self, x: Residual, norm: Norm) -> Tensor:
        """Return the normed rows, after the parts are added in place."""
        if self._reference_norm:
            return reference.rms_norm(self.whole(x), norm.weight, norm.eps)
        return rms_norm(x.rows, norm.weight, norm.eps, parts=x.parts, pdl=self.pdl)

    def _parts(self, plan: Plan, x: Tensor, weight: Weight) -> Tensor:
        """Return the product alone, in parts to be added up: `[splits, num_tokens, n]`."""
        if plan.kind is Kind.CUBLAS:
            return functional.linear(x, weight.data)[None]
        parts = torch.empty((plan.splits or 1, x.shape[0], weight.num_out), dtype=torch.float32, device=x.device)
        if plan.kind is Kind.GEMV:
            gemv(x, weight.data, parts[0], pdl=self.pdl, **plan.gemv_tiles)
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
        activation: Activation | None = None,
    ) -> Tensor:
        """Multiply a few tokens; `out` has a plane for each of `plan.splits`, if there are several."""
        fused: Neighbours = {
            "splits": out.shape[0] if out.dim() == 3 else 1,
            "residual": residual,
            "activation": activation,
            "pdl": self.pdl,
        }
        if plan.kind is Kind.RING:
            return ring_gemm(x, weight.data, out, **fused, **plan.ring_tiles)
        return skinny_gemm(x, weight.data, out, **fused, **plan.skinny_tiles)
