"""Products of codes alone with every neighbour fused in, at odd sizes, into poisoned outputs."""

import pytest
import torch
from torch import Tensor

from common.base.activation import Activation
from common.kernels.products.join_parts import join_parts
from common.kernels.products.packed_gemm import packed_gemm
from common.kernels.products.widen import widen
from common.ops import reference
from common.ops.base import Weight, pack
from tests.kernels.conftest import AssertClose

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's numpy

EPS = 1e-6
SILU, GELU = Activation.SILU.value, Activation.GELU_TANH.value
FORMS = pytest.mark.parametrize(
    ("bits", "group", "has_offsets", "scale_dtype"),
    [
        (4, 128, False, torch.float16),
        (4, 32, True, torch.float16),
        (4, 64, False, torch.float32),
        (4, 0, True, torch.float32),
        (8, 16, False, torch.float16),
        (8, 32, True, torch.float16),
        (8, 64, True, torch.float32),
        (8, 0, False, torch.float16),
    ],
)  # a group of 0 columns is a whole row


class Operands:
    """Random operands whose scales cannot be taken for one another, and what they give in fp64."""

    def __init__(
        self, m: int, n: int, k: int, form: tuple[int, int, bool, torch.dtype], gate: str | None,
        device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        (bits, group, has_offsets, scale_dtype), num_rows = form, n if gate is None else 2 * n
        low, high = (0, 16) if bits == 4 else (-128, 128)
        codes = torch.randint(low, high, (num_rows, k))
        shape = num_rows, k // (group or k)
        self.scales = (10.0 ** (torch.rand(shape) - 2) / high).to(device, scale_dtype)
        self.offsets = (torch.randn(shape) / 10).to(device, scale_dtype) if has_offsets else None
        self.bias = torch.randn(n).to(device, dtype) if gate is None else None
        data = pack(codes.to(torch.uint8)) if bits == 4 else codes.to(torch.int8)
        self.weight = Weight(data.to(device), self.bias, self.scales, dtype, self.offsets, bits == 8)
        self.x = (torch.randn(m, k) * 10.0 ** torch.randint(-1, 2, (m, 1))).to(device, dtype)
        self.norm = torch.randn(k).to(device, dtype)
        self.residual = torch.randn(m, n).to(device, dtype)

    @property
    def codes(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.weight.data, self.scales, self.offsets

    def expected(self, gate: str | None, *, has_norm: bool, has_residual: bool, has_bias: bool) -> Tensor:
        x = self.x.double()
        if has_norm:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.norm.double()
        product = x @ reference.dequantized(self.weight).double().t()
        if gate is not None:
            product = reference.gate_mul(product, Activation(gate))
        if has_bias and self.bias is not None:
            product += self.bias.double()
        return (product + self.residual.double() if has_residual else product).to(self.x.dtype)


@FORMS
@pytest.mark.parametrize(
    ("m", "n", "k", "rows", "warps", "stages", "splits", "has_residual", "has_bias", "gate"),
    [
        (3, 40, 640, 16, 2, 2, 3, True, True, None),
        (9, 70, 384, 32, 4, 9, 1, False, False, GELU),
        (33, 66, 640, 64, 1, 3, 1, True, True, None),
    ],
)
def test_few_tokens(
    m: int, n: int, k: int, rows: int, warps: int, stages: int, splits: int, has_residual: bool, has_bias: bool,
    gate: str | None, bits: int, group: int, has_offsets: bool, scale_dtype: torch.dtype, device: torch.device,
    dtype: torch.dtype, assert_close: AssertClose,
) -> None:  # fmt: skip
    operands = Operands(m, n, k, (bits, group, has_offsets, scale_dtype), gate, device, dtype)

    def product(out: Tensor, splits: int, residual: Tensor | None) -> Tensor:
        return packed_gemm(
            operands.x, *operands.codes, out, rows=rows, warps=warps, stages=stages, splits=splits, residual=residual,
            bias=operands.bias if has_bias else None, activation=gate,
        )  # fmt: skip

    if splits == 1:
        residual = operands.residual if has_residual else None
        out = product(torch.empty(m, n, device=device, dtype=dtype), 1, residual)
    else:
        parts = product(torch.empty(splits, m, n, device=device), splits, None)
        out = join_parts(parts, operands.residual.clone())
    assert_close(out, operands.expected(gate, has_norm=False, has_residual=has_residual, has_bias=has_bias))


@FORMS
@pytest.mark.parametrize(
    ("n", "k", "rows", "warps", "stages", "has_norm", "has_residual", "has_bias", "gate"),
    [
        (7, 512, 32, 1, 9, True, False, False, None),
        (96, 1280, 16, 4, 2, False, True, True, None),
        (7, 1280, 16, 4, 2, True, False, False, SILU),
    ],
)
def test_a_lone_token(
    n: int, k: int, has_norm: bool, has_residual: bool, has_bias: bool, gate: str | None, rows: int, warps: int,
    stages: int, bits: int, group: int, has_offsets: bool, scale_dtype: torch.dtype, device: torch.device,
    dtype: torch.dtype, assert_close: AssertClose,
) -> None:  # fmt: skip
    operands = Operands(1, n, k, (bits, group, has_offsets, scale_dtype), gate, device, dtype)
    out = packed_gemm(
        operands.x,
        *operands.codes,
        torch.empty(1, n, device=device, dtype=dtype),
        rows=rows,
        warps=warps,
        stages=stages,
        norm=operands.norm if has_norm else None,
        eps=EPS,
        residual=operands.residual if has_residual else None,
        bias=operands.bias if has_bias else None,
        activation=gate,
    )
    assert_close(out, operands.expected(gate, has_norm=has_norm, has_residual=has_residual, has_bias=has_bias))


@FORMS
@pytest.mark.parametrize(("n", "k"), [(13, 640), (8, 512)])
def test_elements_are_widened(
    n: int, k: int, bits: int, group: int, has_offsets: bool, scale_dtype: torch.dtype, device: torch.device,
    dtype: torch.dtype, assert_close: AssertClose,
) -> None:  # fmt: skip
    operands = Operands(1, n, k, (bits, group, has_offsets, scale_dtype), None, device, dtype)
    out = widen(*operands.codes, torch.empty(n, k, device=device, dtype=dtype))
    assert_close(out, reference.dequantized(operands.weight).to(dtype))
