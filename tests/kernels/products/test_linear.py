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

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's numpy

EPS = 1e-6
SHAPES = [(6, 256), (33, 320), (130, 96), (64, 1000)]
SILU, GELU, CLAMPED = (each.value for each in Activation)
FUSIONS: list[tuple[bool, bool, bool, str | None]] = [
    (False, False, False, None),
    (True, False, False, None),
    (False, True, False, None),
    (False, True, True, None),
    (True, False, False, SILU),
    (True, False, False, GELU),
    (True, False, False, CLAMPED),
]  # norm, residual, bias, activation of the gate
ENDINGS: list[tuple[int, bool, bool, str | None]] = [
    (1, False, False, SILU),
    (1, False, False, GELU),
    (1, False, False, CLAMPED),
    (1, True, False, None),
    (1, True, True, None),
]  # splits, residual, bias, activation of the gate


class Operands:
    """Random operands, and what they give by the reference."""

    def __init__(self, m: int, n: int, k: int, device: torch.device, dtype: torch.dtype) -> None:
        self.x = torch.randn(m, k).to(device, dtype)
        self.weight = (torch.randn(n, k) * 0.1).to(device, dtype)
        self.gate_up = (torch.randn(2 * n, k) * 0.1).to(device, dtype)
        self.norm = torch.randn(k).to(device, dtype)
        self.residual = torch.randn(m, n).to(device, dtype)
        self.bias = torch.randn(n).to(device, dtype)

    def matrix(self, gate: str | None) -> Tensor:
        return self.weight if gate is None else self.gate_up

    def expected(
        self, *, has_norm: bool = False, has_residual: bool = False, has_bias: bool = False, gate: str | None = None
    ) -> Tensor:
        x = self.x.double().cpu()
        if has_norm:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.norm.double().cpu()
        y = x @ self.matrix(gate).double().cpu().t()
        if gate is not None:
            y = reference.gate_mul(y, Activation(gate))
        if has_bias:
            y = y + self.bias.double().cpu()
        if has_residual:
            y = y + self.residual.double().cpu()
        return y.to(self.x.device, self.x.dtype)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize(("has_norm", "has_residual", "has_bias", "gate"), FUSIONS)
@pytest.mark.parametrize(("rows", "warps", "unroll", "stages"), [(4, 2, 1, 1), (2, 1, 2, 2), (2, 1, 1, 9)])
def test_gemv(
    n: int, k: int, has_norm: bool, has_residual: bool, has_bias: bool, gate: str | None,
    rows: int, warps: int, unroll: int, stages: int,
    device: torch.device, dtype: torch.dtype, assert_close: AssertClose,
) -> None:  # fmt: skip
    operands = Operands(1, n, k, device, dtype)
    out = gemv(
        operands.x,
        operands.matrix(gate),
        torch.empty(1, n, device=device, dtype=dtype),
        rows=rows,
        warps=warps,
        unroll=unroll,
        stages=stages,
        norm=operands.norm if has_norm else None,
        eps=EPS,
        residual=operands.residual if has_residual else None,
        bias=operands.bias if has_bias else None,
        activation=gate,
    )
    expected = operands.expected(has_norm=has_norm, has_residual=has_residual, has_bias=has_bias, gate=gate)
    assert_close(out, expected)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 2, 16, 17, 33, 64])
@pytest.mark.parametrize(
    ("splits", "has_residual", "has_bias", "gate"), [*ENDINGS, (3, True, False, None), (3, True, True, None)]
)
def test_skinny_gemm(
    n: int, k: int, m: int, splits: int, has_residual: bool, has_bias: bool, gate: str | None,
    device: torch.device, dtype: torch.dtype, assert_close: AssertClose,
) -> None:  # fmt: skip
    operands = Operands(m, n, k, device, dtype)
    bias = operands.bias if has_bias else None
    tiles = Plan(Kind.SKINNY, block_n=32, block_k=64, stages=2, warps=4).skinny_tiles

    def product(out: Tensor, splits: int, residual: Tensor | None) -> Tensor:
        return skinny_gemm(
            operands.x,
            operands.matrix(gate),
            out,
            splits=splits,
            residual=residual,
            bias=bias,
            activation=gate,
            **tiles,
        )

    out = run(product, operands, splits, has_residual)
    assert_close(out, operands.expected(has_residual=has_residual, has_bias=has_bias, gate=gate))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k", "block_k", "stages"), [(33, 256, 64, 2), (130, 512, 64, 8), (64, 1024, 128, 3)])
@pytest.mark.parametrize("m", [1, 2, 8, 9, 16, 33, 64])
@pytest.mark.parametrize(
    ("splits", "has_residual", "has_bias", "gate"), [*ENDINGS, (2, True, False, None), (2, True, True, None)]
)
def test_ring_gemm(
    n: int, k: int, block_k: int, stages: int, m: int, splits: int, has_residual: bool, has_bias: bool,
    gate: str | None,
    dtype: torch.dtype, hopper: torch.device, assert_close: AssertClose,
) -> None:  # fmt: skip
    operands = Operands(m, n, k, hopper, dtype)
    bias = operands.bias if has_bias else None

    def product(out: Tensor, splits: int, residual: Tensor | None) -> Tensor:
        return ring_gemm(
            operands.x,
            operands.matrix(gate),
            out,
            block_k=block_k,
            stages=stages,
            splits=splits,
            residual=residual,
            bias=bias,
            activation=gate,
        )

    out = run(product, operands, splits, has_residual)
    assert_close(out, operands.expected(has_residual=has_residual, has_bias=has_bias, gate=gate))


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
        expected = operands.expected(has_residual=True)
        residual = operands.residual
        if m == 1:
            gemv(operands.x, operands.weight, residual, rows=4, warps=1, residual=residual)
        else:
            skinny_gemm(
                operands.x, operands.weight, residual, block_n=16, block_k=32, stages=2, warps=4, residual=residual
            )
        assert_close(residual, expected)
