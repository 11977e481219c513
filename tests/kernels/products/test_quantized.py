"""Products of codes with every neighbour fused in, at odd sizes, into poisoned outputs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.base.activation import Activation
from common.kernels.base.codes import GROUP, LARGEST, readable
from common.kernels.products.join_parts import join_parts
from common.kernels.products.quantized_gemm import quantized_gemm, quantized_gemm_parts
from common.kernels.products.quantized_gemv import quantized_gemv
from common.kernels.products.quantized_ring import quantized_ring
from common.kernels.products.skinny_gemm import skinny_gemm
from common.ops import reference
from common.ops.base import Weight
from tests.kernels.conftest import AssertClose

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's numpy

EPS = 1e-6
FP8, INT8 = torch.float8_e4m3fn, torch.int8
CODES = pytest.mark.parametrize("codes", [FP8, INT8], ids=["fp8", "int8"])
SILU, GELU = Activation.SILU.value, Activation.GELU_TANH.value
CASES = pytest.mark.parametrize(
    ("form", "splits", "has_residual", "has_bias", "gate"),
    [
        ("rows", 1, False, False, None),
        ("rows", 1, True, True, None),
        ("rows", 1, False, False, SILU),
        ("rows", 1, False, False, GELU),
        ("rows", 2, True, True, None),
        ("blocks", 1, False, False, None),
        ("blocks", 1, False, False, SILU),
        ("blocks", 2, True, False, None),
        ("columns", 1, True, False, None),
        ("columns", 1, False, False, SILU),
    ],
)  # form of the scales, and what is fused


class Operands:
    """Random operands whose scales cannot be taken for one another, and what they give by the law."""

    def __init__(
        self, m: int, n: int, k: int, codes: torch.dtype, form: str, gate: str | None, device: torch.device,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        num_rows = n if gate is None else 2 * n
        shape = {
            "rows": (num_rows, 1),
            "blocks": (-(-num_rows // GROUP), -(-k // GROUP)),
            "columns": (num_rows, -(-k // GROUP)),
        }[form]
        scales = (10.0 ** (2 * torch.rand(shape) - 5)).to(device)
        matrix, _ = reference.quantize(torch.randn(num_rows, k), codes)
        matrix = (matrix.float() / LARGEST[codes] * 100).to(codes)
        bias = torch.randn(n).to(device, dtype) if gate is None else None
        self.weight, self.gate, self.weight_scales = Weight(matrix.to(device), bias, scales, dtype), gate, scales
        self.x = (torch.randn(m, k) * 10.0 ** torch.randint(-1, 2, (m, 1))).to(device, dtype)
        self.norm = torch.randn(k).to(device, dtype)
        made, x_scales = reference.quantize(self.x, codes, self.weight.scale_columns)
        self.codes, self.scales = made, x_scales.t().contiguous().t()
        self.residual = torch.randn(m, n).to(device, dtype)

    def ended(self, product: Tensor, *, has_residual: bool, has_bias: bool) -> Tensor:
        """A product in fp64 with what is fused behind it."""
        if self.gate is not None:
            product = reference.gate_mul(product, Activation(self.gate))
        if has_bias and self.weight.bias is not None:
            product = product + self.weight.bias.double()
        if has_residual:
            product = product + self.residual.double()
        return product.to(self.x.dtype)

    def quantized(self, *, has_residual: bool, has_bias: bool) -> Tensor:
        """What is to come of activations in codes."""
        activations = reference.dequantized(Weight(self.codes, None, self.scales.contiguous()))
        product = activations.double() @ reference.dequantized(self.weight).double().t()
        return self.ended(product, has_residual=has_residual, has_bias=has_bias)

    def plain(self, *, has_norm: bool, has_residual: bool, has_bias: bool) -> Tensor:
        """What is to come of activations as they are."""
        x = self.x.double()
        if has_norm:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.norm.double()
        return self.ended(
            x @ reference.dequantized(self.weight).double().t(), has_residual=has_residual, has_bias=has_bias
        )


@CODES
@CASES
@pytest.mark.parametrize(("m", "n", "k"), [(1, 33, 320), (5, 130, 128), (17, 64, 1000), (64, 130, 512)])
def test_skinny(
    m: int, n: int, k: int, splits: int, has_residual: bool, has_bias: bool, gate: str | None, form: str,
    codes: torch.dtype, device: torch.device, dtype: torch.dtype, assert_close: AssertClose,
) -> None:  # fmt: skip
    operands = Operands(m, n, k, codes, form, gate, device, dtype)
    weight = operands.weight

    def product(out: Tensor, splits: int, residual: Tensor | None) -> Tensor:
        return skinny_gemm(
            operands.codes, weight.data, out, x_scales=operands.scales, scales=operands.weight_scales, splits=splits,
            residual=residual, bias=weight.bias if has_bias else None, activation=gate,
            block_n=32, block_k=64, stages=2, warps=4,
        )  # fmt: skip

    out = run(product, operands, splits, has_residual)
    assert_close(out, operands.quantized(has_residual=has_residual, has_bias=has_bias))


@pytest.mark.gpu
@CODES
@CASES
@pytest.mark.parametrize(("n", "k", "block_k", "stages"), [(130, 512, 128, 8), (33, 1024, 256, 2)])
@pytest.mark.parametrize("m", [1, 9, 64])
def test_ring(
    n: int, k: int, block_k: int, stages: int, m: int, splits: int, has_residual: bool, has_bias: bool,
    gate: str | None, form: str, codes: torch.dtype, hopper: torch.device,
    assert_close: AssertClose,
) -> None:  # fmt: skip
    dtype, block_k = torch.bfloat16, block_k if form == "rows" else GROUP
    operands = Operands(m, n, k, codes, form, gate, hopper, dtype)
    weight = operands.weight

    def product(out: Tensor, splits: int, residual: Tensor | None) -> Tensor:
        return quantized_ring(
            operands.codes, operands.scales, weight.data, operands.weight_scales, out, splits=splits, residual=residual,
            bias=weight.bias if has_bias else None, activation=gate, block_k=block_k, stages=stages,
        )  # fmt: skip

    out = run(product, operands, splits, has_residual)
    expected = operands.quantized(has_residual=has_residual, has_bias=has_bias)
    if codes == INT8:
        assert_close(out, expected)
    else:  # the matrix unit's sums of 128 products of e4m3 keep 13 bits
        assert torch.isfinite(out).all()
        assert (out.float() - expected.float()).norm() < 8e-3 * expected.float().norm()


@pytest.mark.gpu
@CODES
@pytest.mark.parametrize("form", ["rows", "blocks", "columns"])
@pytest.mark.parametrize(("n", "k"), [(7, 512), (130, 320), (256, 1008)])
@pytest.mark.parametrize(
    ("has_norm", "has_residual", "has_bias", "gate"),
    [(True, False, False, None), (False, True, True, None), (True, False, False, SILU)],
)
@pytest.mark.parametrize(("rows", "warps", "stages"), [(8, 2, 1), (16, 1, 5), (8, 4, 20)])
@pytest.mark.parametrize("as_bytes", [False, True], ids=["native", "bytes"])
def test_gemv(
    n: int, k: int, has_norm: bool, has_residual: bool, has_bias: bool, gate: str | None, rows: int, warps: int,
    stages: int, form: str, codes: torch.dtype, as_bytes: bool, hopper: torch.device, assert_close: AssertClose,
) -> None:  # fmt: skip
    if as_bytes and codes == INT8:
        pytest.skip("signed bytes have one form")
    dtype = torch.bfloat16
    operands = Operands(1, n, k, codes, form, gate, hopper, dtype)
    weight = operands.weight
    out = quantized_gemv(
        operands.x,
        readable(weight.data, has_e4m3=not as_bytes),
        operands.weight_scales,
        torch.full((1, n), torch.nan, device=hopper, dtype=dtype),
        rows=rows,
        warps=warps,
        stages=stages,
        norm=operands.norm if has_norm else None,
        eps=EPS,
        residual=operands.residual if has_residual else None,
        bias=weight.bias if has_bias else None,
        activation=gate,
    )
    assert_close(out, operands.plain(has_norm=has_norm, has_residual=has_residual, has_bias=has_bias))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gate", [None, SILU, GELU])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 128, 128), (65, 264, 80), (130, 1000, 512), (300, 8, 2048), (5000, 520, 272)]
)
@CODES
def test_many_tokens(
    m: int, n: int, k: int, gate: str | None, codes: torch.dtype, dtype: torch.dtype, hopper: torch.device,
    assert_close: AssertClose,
) -> None:  # fmt: skip
    operands = Operands(m, n, k, codes, "rows", gate, hopper, dtype)
    tokens, matrix = (operands.codes, operands.scales), (operands.weight.data, operands.weight_scales)
    out = quantized_gemm(*tokens, *matrix, dtype, activation=gate)
    expected = operands.quantized(has_residual=False, has_bias=False)
    assert_close(out, expected)
    if gate is None:
        for splits in (1, 2, 3, 8):
            parts = quantized_gemm_parts(*tokens, *matrix, splits)
            assert_close(parts.sum(0).to(dtype), expected)


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
