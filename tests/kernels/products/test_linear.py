"""GEMV and skinny GEMM with every neighbour fused in, at odd sizes, into poisoned outputs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.base.activation import Activation
from common.kernels.products.gemv import gemv
from common.kernels.products.join_parts import join_parts
from common.kernels.products.ring_gemm import ring_gemm
from common.kernels.products.skinny_gemm import skinny_gemm
from common.ops import reference
from common.ops.linear_plan import Kind, Plan
from tests.kernels.conftest import AssertClose

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's; infinity is right
EPS = 1e-6
SHAPES = [(6, 256), (33, 320), (130, 96), (64, 1000)]
SILU, GELU = Activation.SILU, Activation.GELU_TANH
FUSIONS = [(False, False, None), (True, False, None), (False, True, None), (True, False, SILU), (True, False, GELU)]
FUSIONS_OF_FEW = [(1, False, SILU), (1, False, GELU), (1, True, None)]


class Operands:
    """Random operands, and what they give by the reference."""

    def __init__(self, m: int, n: int, k: int, device: torch.device, dtype: torch.dtype) -> None:
        self.x = torch.randn(m, k).to(device, dtype)
        self.weight = (torch.randn(n, k) * 0.1).to(device, dtype)
        self.gate_up = (torch.randn(2 * n, k) * 0.1).to(device, dtype)
        self.norm = torch.randn(k).to(device, dtype)
        self.residual = torch.randn(m, n).to(device, dtype)

    def expected(self, *, has_norm: bool, has_residual: bool, activation: Activation | None) -> Tensor:
        x = self.x.double().cpu()
        if has_norm:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.norm.double().cpu()
        y = x @ (self.gate_up if activation else self.weight).double().cpu().t()
        if activation:
            y = reference.gate_mul(y, activation)
        if has_residual:
            y = y + self.residual.double().cpu()
        return y.to(self.x.device, self.x.dtype)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize(("has_norm", "has_residual", "activation"), FUSIONS)
@pytest.mark.parametrize(("rows", "warps", "unroll", "stages"), [(4, 2, 1, 1), (2, 1, 2, 2), (2, 1, 1, 9)])
def test_gemv(
    n: int, k: int, has_norm: bool, has_residual: bool, activation: Activation | None,
    rows: int, warps: int, unroll: int, stages: int,
    device: torch.device, dtype: torch.dtype, assert_close: AssertClose,
) -> None:  # fmt: skip
    operands = Operands(1, n, k, device, dtype)
    out = gemv(
        operands.x,
        operands.gate_up if activation else operands.weight,
        torch.empty(1, n, device=device, dtype=dtype),
        rows=rows,
        warps=warps,
        unroll=unroll,
        stages=stages,
        norm=operands.norm if has_norm else None,
        eps=EPS,
        residual=operands.residual if has_residual else None,
        activation=activation,
    )
    assert_close(out, operands.expected(has_norm=has_norm, has_residual=has_residual, activation=activation))


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 2, 16, 17, 33, 64])
@pytest.mark.parametrize(("splits", "has_residual", "activation"), [*FUSIONS_OF_FEW, (3, True, None)])
def test_skinny_gemm(
    n: int, k: int, m: int, splits: int, has_residual: bool, activation: Activation | None,
    device: torch.device, dtype: torch.dtype, assert_close: AssertClose,
) -> None:  # fmt: skip
    operands = Operands(m, n, k, device, dtype)
    tiles = Plan(Kind.SKINNY, block_n=32, block_k=64, stages=2, warps=4).skinny_tiles

    def product(out: Tensor, splits: int, residual: Tensor | None) -> Tensor:
        weight = operands.gate_up if activation else operands.weight
        return skinny_gemm(operands.x, weight, out, splits=splits, residual=residual, activation=activation, **tiles)

    out = run(product, operands, splits, has_residual)
    assert_close(out, operands.expected(has_norm=False, has_residual=has_residual, activation=activation))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k", "block_k", "stages"), [(33, 256, 64, 2), (130, 512, 64, 8), (64, 1024, 128, 3)])
@pytest.mark.parametrize("m", [1, 2, 8, 9, 16, 33, 64])
@pytest.mark.parametrize(("splits", "has_residual", "activation"), [*FUSIONS_OF_FEW, (2, True, None)])
def test_ring_gemm(
    n: int, k: int, block_k: int, stages: int, m: int, splits: int, has_residual: bool, activation: Activation | None,
    dtype: torch.dtype, hopper: torch.device, assert_close: AssertClose,
) -> None:  # fmt: skip
    operands = Operands(m, n, k, hopper, dtype)

    def product(out: Tensor, splits: int, residual: Tensor | None) -> Tensor:
        weight = operands.gate_up if activation else operands.weight
        return ring_gemm(
            operands.x,
            weight,
            out,
            block_k=block_k,
            stages=stages,
            splits=splits,
            residual=residual,
            activation=activation,
        )

    out = run(product, operands, splits, has_residual)
    assert_close(out, operands.expected(has_norm=False, has_residual=has_residual, activation=activation))


def run(
    product: Callable[[Tensor, int, Tensor | None], Tensor], operands: Operands, splits: int, has_residual: bool
) -> Tensor:
    """The product into poisoned memory, in parts or whole."""
    x, residual = operands.x, operands.residual if has_residual else None
    m, n = operands.residual.shape
    if splits == 1:
        return product(torch.empty(m, n, device=x.device, dtype=x.dtype), 1, residual)
    assert residual is not None, "parts are added to something"
    return join_parts(product(torch.empty(splits, m, n, device=x.device), splits, None), residual.clone())


def test_the_residual_may_be_the_output(device: torch.device, dtype: torch.dtype, assert_close: AssertClose) -> None:
    for m in (1, 5):
        operands = Operands(m, 40, 96, device, dtype)
        expected = operands.expected(has_norm=False, has_residual=True, activation=None)
        residual = operands.residual
        if m == 1:
            gemv(operands.x, operands.weight, residual, rows=4, warps=1, residual=residual)
        else:
            skinny_gemm(
                operands.x, operands.weight, residual, block_n=16, block_k=32, stages=2, warps=4, residual=residual
            )
        assert_close(residual, expected)
