"""Products of codes alone with every neighbour fused in, at odd sizes, into poisoned outputs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.base.activation import Activation
from common.kernels.products.byte_gemm import byte_gemm
from common.kernels.products.join_parts import join_parts
from common.kernels.products.nibble_gemm import MAX_TOKENS, nibble_gemm
from common.kernels.products.widen import widen
from common.ops import reference
from common.ops.base import Weight, pack
from tests.kernels.conftest import AssertClose

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's numpy

EPS = 1e-6
SILU, GELU = Activation.SILU.value, Activation.GELU_TANH.value
Form = tuple[int, int, bool, torch.dtype]
"""Bits, columns of a group (0: a whole row), whether there are offsets, and the scales' dtype."""
NIBBLES: list[Form] = [
    (4, 128, False, torch.float16),
    (4, 128, True, torch.float32),
    (4, 32, True, torch.float16),
    (4, 32, False, torch.float32),
    (4, 64, False, torch.float32),
    (4, 0, True, torch.float32),
]
BYTES: list[Form] = [
    (8, 16, False, torch.float16),
    (8, 32, True, torch.float16),
    (8, 64, True, torch.float32),
    (8, 0, False, torch.float16),
]


def name(form: object) -> str | None:
    return "-".join(str(each).removeprefix("torch.") for each in form) if isinstance(form, tuple) else None


class Operands:
    """Random operands whose scales cannot be taken for one another, and what they give in fp64."""

    def __init__(
        self, m: int, n: int, k: int, form: Form, gate: str | None,
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


def few_tokens(
    multiply: Callable[..., Tensor], operands: Operands, tiles: dict[str, int], splits: int, has_residual: bool,
    has_bias: bool, gate: str | None,
) -> Tensor:  # fmt: skip
    """Multiply into poisoned memory, in parts or whole."""
    x, options = operands.x, {"bias": operands.bias if has_bias else None, "activation": gate} | tiles
    m, n = operands.residual.shape
    if splits == 1:
        out = torch.empty(m, n, device=x.device, dtype=x.dtype)
        return multiply(x, *operands.codes, out, residual=operands.residual if has_residual else None, **options)
    parts = multiply(x, *operands.codes, torch.empty(splits, m, n, device=x.device), splits=splits, **options)
    return join_parts(parts, operands.residual.clone())


FEW_TOKENS = pytest.mark.parametrize(
    ("m", "n", "k", "rows", "warps", "stages", "splits", "has_residual", "has_bias", "gate"),
    [
        (3, 40, 640, 16, 2, 2, 3, True, True, None),
        (9, 70, 384, 32, 4, 9, 1, False, False, GELU),
        (33, 66, 640, 64, 1, 3, 1, True, True, None),
    ],
)
A_LONE_TOKEN = pytest.mark.parametrize(
    ("n", "k", "rows", "warps", "stages", "has_norm", "has_residual", "has_bias", "gate"),
    [
        (7, 512, 32, 1, 9, True, False, False, None),
        (96, 1280, 16, 4, 2, False, True, True, None),
        (7, 1280, 16, 4, 2, True, False, False, SILU),
    ],
)


@pytest.mark.parametrize("form", BYTES, ids=name)
@FEW_TOKENS
def test_bytes_of_few_tokens(
    m: int, n: int, k: int, rows: int, warps: int, stages: int, splits: int, has_residual: bool, has_bias: bool,
    gate: str | None, form: Form, device: torch.device, dtype: torch.dtype, assert_close: AssertClose,
) -> None:  # fmt: skip
    operands, tiles = Operands(m, n, k, form, gate, device, dtype), {"rows": rows, "warps": warps, "stages": stages}
    out = few_tokens(byte_gemm, operands, tiles, splits, has_residual, has_bias, gate)
    assert_close(out, operands.expected(gate, has_norm=False, has_residual=has_residual, has_bias=has_bias))


@pytest.mark.gpu
@pytest.mark.parametrize("form", NIBBLES, ids=name)
@FEW_TOKENS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_nibbles_of_few_tokens(
    m: int, n: int, k: int, rows: int, warps: int, stages: int, splits: int, has_residual: bool, has_bias: bool,
    gate: str | None, form: Form, cuda: torch.device, dtype: torch.dtype, assert_close: AssertClose,
) -> None:  # fmt: skip
    m = min(m, MAX_TOKENS)
    operands, tiles = Operands(m, n, k, form, gate, cuda, dtype), {"rows": rows, "warps": warps, "stages": stages}
    out = few_tokens(nibble_gemm, operands, tiles, splits, has_residual, has_bias, gate)
    assert_close(out, operands.expected(gate, has_norm=False, has_residual=has_residual, has_bias=has_bias))


def lone_token(
    multiply: Callable[..., Tensor], operands: Operands, tiles: dict[str, int], has_norm: bool, has_residual: bool,
    has_bias: bool, gate: str | None,
) -> Tensor:  # fmt: skip
    """Multiply into poisoned memory."""
    return multiply(
        operands.x,
        *operands.codes,
        torch.empty_like(operands.residual),
        norm=operands.norm if has_norm else None,
        eps=EPS,
        residual=operands.residual if has_residual else None,
        bias=operands.bias if has_bias else None,
        activation=gate,
        **tiles,
    )


@pytest.mark.parametrize("form", BYTES, ids=name)
@A_LONE_TOKEN
def test_bytes_of_a_lone_token(
    n: int, k: int, rows: int, warps: int, stages: int, has_norm: bool, has_residual: bool, has_bias: bool,
    gate: str | None, form: Form, device: torch.device, dtype: torch.dtype, assert_close: AssertClose,
) -> None:  # fmt: skip
    operands, tiles = Operands(1, n, k, form, gate, device, dtype), {"rows": rows, "warps": warps, "stages": stages}
    out = lone_token(byte_gemm, operands, tiles, has_norm, has_residual, has_bias, gate)
    assert_close(out, operands.expected(gate, has_norm=has_norm, has_residual=has_residual, has_bias=has_bias))


@pytest.mark.gpu
@pytest.mark.parametrize("form", NIBBLES, ids=name)
@A_LONE_TOKEN
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_nibbles_of_a_lone_token(
    n: int, k: int, rows: int, warps: int, stages: int, has_norm: bool, has_residual: bool, has_bias: bool,
    gate: str | None, form: Form, cuda: torch.device, dtype: torch.dtype, assert_close: AssertClose,
) -> None:  # fmt: skip
    operands, tiles = Operands(1, n, k, form, gate, cuda, dtype), {"rows": rows, "warps": warps, "stages": stages}
    out = lone_token(nibble_gemm, operands, tiles, has_norm, has_residual, has_bias, gate)
    assert_close(out, operands.expected(gate, has_norm=has_norm, has_residual=has_residual, has_bias=has_bias))


@pytest.mark.parametrize("form", NIBBLES + BYTES, ids=name)
@pytest.mark.parametrize(("n", "k"), [(13, 640), (8, 512)])
def test_elements_are_widened(
    n: int, k: int, form: Form, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    operands = Operands(1, n, k, form, None, device, dtype)
    out = widen(*operands.codes, torch.empty(n, k, device=device, dtype=dtype))
    assert_close(out, reference.dequantized(operands.weight).to(dtype))
