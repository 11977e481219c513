"""Products of codes alone with every neighbour fused in, at odd sizes, into poisoned outputs."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from common.base.activation import Activation
from common.kernels.products.join_parts import join_parts
from common.kernels.products.packed_gemm import MAX_TOKENS, packed_gemm
from common.kernels.products.packed_ring import packed_ring
from common.kernels.products.widen import widen
from common.ops import reference
from common.ops.base import Weight, float_elements, pack, unpack
from tests.kernels.conftest import AssertClose
from tests.kernels.products.rounding import rounding

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's numpy

EPS = 1e-6
SILU, GELU = Activation.SILU.value, Activation.GELU_TANH.value
Form = tuple[int, int, bool, torch.dtype]
"""Bits, columns of a group (0: a whole row), whether there are offsets, and the scales' dtype: of e2m1 bytes."""
NIBBLES: list[Form] = [
    (4, 128, False, torch.float16),
    (4, 128, True, torch.float32),
    (4, 32, True, torch.float16),
    (4, 32, False, torch.float32),
    (4, 64, False, torch.float32),
    (4, 0, True, torch.float32),
]
FLOATS: Form = (4, 16, False, torch.uint8)
BYTES: list[Form] = [
    (8, 16, False, torch.float16),
    (8, 32, True, torch.float16),
    (8, 64, True, torch.float32),
    (8, 0, False, torch.float16),
    (8, 32, False, torch.float16),
    (8, 16, True, torch.float32),
    (8, 128, False, torch.float32),
    (8, 192, True, torch.float16),
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
        self.factors = None
        if scale_dtype == torch.uint8:  # exponents of all numbers of e4m3
            self.scales = (8 * torch.randint(13, 31, shape) + torch.randint(0, 7, shape)).to(device, scale_dtype)
            self.factors = (10.0 ** (torch.rand(num_rows, 1) * 2 - 6)).to(device)
        self.offsets = (torch.randn(shape) / 10).to(device, scale_dtype) if has_offsets else None
        self.bias = torch.randn(n).to(device, dtype) if gate is None else None
        data = pack(codes.to(torch.uint8 if bits == 4 else torch.int8))
        self.weight = Weight(data.to(device), self.bias, self.scales, dtype, self.offsets, bits == 8, self.factors)
        self.x = (torch.randn(m, k) * 10.0 ** torch.randint(-1, 2, (m, 1))).to(device, dtype)
        self.norm = torch.randn(k).to(device, dtype)
        self.residual = torch.randn(m, n).to(device, dtype)

    @property
    def codes(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.weight.data, self.scales, self.offsets, self.factors

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

    def slack(self, gate: str, law: Tensor) -> Tensor:
        """Return how far a normed and gated token may be from its law: three times the spread of largest roundings.

        Inputs are rounded behind the norm. So are scales, products with scales, offsets and elements, if groups are
        narrow. A gate far below zero is small by much more than its error.
        """
        unit, x, rows = torch.finfo(self.x.dtype).eps / 2, self.x.double(), self.weight.num_out // 2
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.norm.double()
        elements = reference.dequantized(self.weight).double()
        offsets = torch.zeros_like(self.scales) if self.offsets is None else self.offsets
        offset = offsets.double().repeat_interleave(self.weight.scale_columns, 1)
        rounded = 2 * elements.square() + 2 * (elements - offset).square() + offset.square()
        spread = unit * (rounded @ x.square().t()).sqrt().t()
        product = (x @ elements.t()).requires_grad_()
        reference.gate_mul(product, Activation(gate)).sum().backward()
        assert product.grad is not None
        each = (product.grad * spread).square()
        return 3 * (each[:, :rows] + each[:, rows:]).sqrt() + 2 * unit * law.double().abs()


Options = dict[str, object]


class Few(NamedTuple):
    """A product of a few tokens, with tiles of a kernel."""

    m: int
    n: int
    k: int
    tiles: dict[str, int]
    splits: int = 1
    has_residual: bool = False
    has_bias: bool = False
    gate: str | None = None


def tiles(rows: int, warps: int, stages: int) -> dict[str, int]:
    return {"rows": rows, "warps": warps, "stages": stages}


def ring(block_k: int, stages: int, token_stages: int) -> dict[str, int]:
    return {"block_k": block_k, "stages": stages, "token_stages": token_stages}


IN_PARTS = Few(3, 40, 640, tiles(16, 2, 2), 3, True, True)
GATED = Few(9, 70, 384, tiles(32, 4, 9), gate=GELU)
MOST = Few(MAX_TOKENS, 66, 640, tiles(64, 1, 3), 1, True, True)
UNEVEN = Few(11, 50, 576, tiles(16, 4, 2))
NORMED = Few(1, 7, 512, tiles(32, 1, 9))
ADDED = Few(1, 96, 1280, tiles(16, 4, 2), 1, True, True)
NORMED_AND_GATED = Few(1, 7, 1280, tiles(16, 4, 2), gate=SILU)
LONE_IN_PARTS = Few(1, 40, 1280, tiles(16, 2, 2), 3, True, True)


def cases_of(*pairs: tuple[Few, Form]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("few", "form"), [pytest.param(few, form, id=f"{few.m}-{few.n}-{few.k}-{name(form)}") for few, form in pairs]
    )


def check(
    multiply: Callable[..., Tensor], few: Few, form: Form, device: torch.device, dtype: torch.dtype,
    assert_close: AssertClose, *, has_norm: bool = False,
) -> None:  # fmt: skip
    """Multiply into poisoned memory, in parts or whole, and compare with the law."""
    operands = Operands(few.m, few.n, few.k, form, few.gate, device, dtype)
    x, options = operands.x, Options(bias=operands.bias if few.has_bias else None, activation=few.gate, **few.tiles)
    if has_norm:
        options |= {"norm": operands.norm, "eps": EPS}
    if few.splits == 1:
        out = torch.empty(few.m, few.n, device=device, dtype=dtype)
        multiply(x, *operands.codes, out, residual=operands.residual if few.has_residual else None, **options)
    else:
        parts = torch.empty(few.splits, few.m, few.n, device=device)
        out = join_parts(multiply(x, *operands.codes, parts, splits=few.splits, **options), operands.residual.clone())
    law = operands.expected(few.gate, has_norm=has_norm, has_residual=few.has_residual, has_bias=few.has_bias)
    if few.gate is not None and has_norm and dtype.itemsize == 2:
        assert ((out - law).abs().double() <= operands.slack(few.gate, law)).all()  # NaN fails
    else:
        assert_close(out, law)


IN_16_BITS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.mark.gpu
@IN_16_BITS
@cases_of(
    (IN_PARTS, NIBBLES[0]), (IN_PARTS, NIBBLES[2]), (GATED, NIBBLES[3]), (GATED, NIBBLES[5]), (MOST, NIBBLES[1]),
    (IN_PARTS, BYTES[0]), (IN_PARTS, BYTES[1]), (GATED, BYTES[1]), (GATED, BYTES[3]), (GATED, BYTES[7]),
    (MOST, BYTES[2]), (UNEVEN, BYTES[5]), (UNEVEN, BYTES[4]), (MOST, NIBBLES[2]), (MOST, NIBBLES[4]), (MOST, BYTES[5]),
    (IN_PARTS, FLOATS), (GATED, FLOATS), (MOST, FLOATS),
)  # fmt: skip
def test_few_tokens(few: Few, form: Form, cuda: torch.device, dtype: torch.dtype, assert_close: AssertClose) -> None:
    check(packed_gemm, few, form, cuda, dtype, assert_close)


@pytest.mark.gpu
@IN_16_BITS
@cases_of(
    (NORMED, NIBBLES[0]), (NORMED, NIBBLES[2]), (ADDED, NIBBLES[5]), (NORMED_AND_GATED, NIBBLES[1]),
    (NORMED_AND_GATED, NIBBLES[4]), (LONE_IN_PARTS, NIBBLES[3]), (NORMED, BYTES[0]), (NORMED, BYTES[2]),
    (ADDED, BYTES[3]), (ADDED, BYTES[5]), (NORMED_AND_GATED, BYTES[1]), (NORMED_AND_GATED, BYTES[4]),
    (LONE_IN_PARTS, BYTES[6]), (UNEVEN._replace(m=1), BYTES[7]), (NORMED, FLOATS), (ADDED, FLOATS),
    (NORMED_AND_GATED, FLOATS), (LONE_IN_PARTS, FLOATS),
)  # fmt: skip
def test_a_lone_token(few: Few, form: Form, cuda: torch.device, dtype: torch.dtype, assert_close: AssertClose) -> None:
    check(packed_gemm, few, form, cuda, dtype, assert_close, has_norm=few in (NORMED, NORMED_AND_GATED))


@pytest.mark.gpu
@IN_16_BITS
@cases_of(
    (Few(3, 40, 640, ring(128, 3, 2), 3, True, True), NIBBLES[0]),
    (Few(9, 70, 384, ring(128, 9, 9), gate=GELU), NIBBLES[2]),
    (Few(33, 66, 640, ring(256, 2, 2), 1, True, True), NIBBLES[1]),
    (Few(64, 130, 1280, ring(256, 9, 3), gate=SILU), NIBBLES[0]),
    (Few(130, 70, 1280, ring(128, 3, 5), 4, True, True), NIBBLES[4]),
    (Few(17, 7, 640, ring(384, 2, 2)), NIBBLES[5]),
    (Few(40, 70, 640, ring(128, 3, 2), gate=SILU), NIBBLES[2]),
    (Few(64, 130, 1280, ring(256, 2, 2), gate=SILU), NIBBLES[2]),
    (Few(64, 130, 1280, ring(256, 2, 2), gate=SILU), NIBBLES[1]),  # of which elements are made beside so many tokens
    (Few(8, 66, 640, ring(256, 3, 2), 2, True, True), NIBBLES[3]),
    (Few(3, 40, 640, ring(128, 3, 2), 3, True, True), BYTES[0]),
    (Few(9, 70, 448, ring(128, 9, 9), gate=GELU), BYTES[1]),
    (Few(33, 66, 640, ring(256, 2, 2), 1, True, True), BYTES[2]),
    (Few(64, 130, 1280, ring(128, 9, 3), gate=SILU), BYTES[4]),
    (Few(130, 70, 1280, ring(128, 3, 5), 4, True, True), BYTES[5]),
    (Few(17, 7, 448, ring(256, 2, 2)), BYTES[3]),  # a group that ends amid a block
    (Few(40, 70, 640, ring(128, 3, 2), gate=SILU), BYTES[2]),
    (Few(64, 70, 576, ring(128, 3, 2), gate=SILU), BYTES[7]),
    (Few(8, 130, 1280, ring(256, 3, 2), 2, True, True), BYTES[6]),
    (Few(20, 66, 576, ring(128, 2, 3)), BYTES[0]),
    (Few(3, 40, 640, ring(128, 3, 2), 3, True, True), FLOATS),
    (Few(9, 70, 384, ring(128, 9, 9), gate=GELU), FLOATS),
    (Few(33, 66, 640, ring(256, 2, 2), 1, True, True), FLOATS),
    (Few(64, 130, 1280, ring(256, 9, 3), gate=SILU), FLOATS),
    (Few(130, 70, 1280, ring(128, 3, 5), 4, True, True), FLOATS),
    (Few(17, 7, 640, ring(384, 2, 2)), FLOATS),
)
def test_rings(few: Few, form: Form, hopper: torch.device, dtype: torch.dtype, assert_close: AssertClose) -> None:
    check(packed_ring, few, form, hopper, dtype, assert_close)


@pytest.mark.gpu
@IN_16_BITS
@pytest.mark.parametrize("form", NIBBLES + BYTES, ids=name)
def test_every_element_of_a_ring(form: Form, hopper: torch.device, dtype: torch.dtype) -> None:
    """Tokens with a single one ask for the elements themselves, which are rounded once."""
    (bits, *_), n, k = form, 70, 1152
    operands = Operands(1, n, k, form, None, hopper, dtype)
    x, out = torch.eye(k, device=hopper, dtype=dtype), torch.empty(k, n, device=hopper, dtype=dtype)
    packed_ring(x, *operands.codes, out, block_k=256, stages=2, token_stages=2)
    codes = unpack(operands.weight.data).double() - (8 if bits == 4 and operands.offsets is None else 0)
    offsets = torch.zeros_like(operands.scales) if operands.offsets is None else operands.offsets
    scale, offset = (each.double().repeat_interleave(k // each.shape[1], 1) for each in (operands.scales, offsets))
    bound = rounding(codes, scale, offset, bits, dtype)
    assert ((out.t().double() - (codes * scale + offset)).abs() <= bound).all()  # NaN fails


@pytest.mark.gpu
@IN_16_BITS
@cases_of(
    (Few(1, 70, 1280, ring(128, 3, 2)), NIBBLES[3]), (Few(1, 70, 640, ring(256, 9, 2), gate=SILU), NIBBLES[1]),
    (Few(1, 70, 1280, ring(128, 3, 2)), BYTES[4]), (Few(1, 70, 640, ring(128, 9, 2), gate=SILU), BYTES[1]),
    (Few(1, 70, 640, ring(256, 2, 2)), BYTES[6]), (Few(1, 70, 640, ring(256, 9, 2), gate=SILU), FLOATS),
)  # fmt: skip
def test_rings_and_a_normed_token(
    few: Few, form: Form, hopper: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    check(packed_ring, few, form, hopper, dtype, assert_close, has_norm=True)


@pytest.mark.gpu
@IN_16_BITS
def test_every_float_of_a_product(hopper: torch.device, dtype: torch.dtype) -> None:
    """Tokens with a single one ask for elements, in each kernel: products with factors are rounded, and no more."""
    n, k = 70, 1152
    operands = Operands(1, n, k, FLOATS, None, hopper, dtype)
    eye = torch.eye(k, device=hopper, dtype=dtype)
    ring_out, few_out, lone_out = (torch.empty(k, n, device=hopper, dtype=dtype) for _ in range(3))
    packed_ring(eye, *operands.codes, ring_out, block_k=256, stages=2, token_stages=2)
    for begin in range(0, k, MAX_TOKENS):
        rows = slice(begin, begin + MAX_TOKENS)
        packed_gemm(eye[rows], *operands.codes, few_out[rows], rows=32, warps=4, stages=2)
    for row in range(k):
        packed_gemm(eye[row : row + 1], *operands.codes, lone_out[row : row + 1], rows=32, warps=4, stages=5)
    assert operands.factors is not None
    values = float_elements(unpack(operands.weight.data), operands.scales, torch.ones_like(operands.factors))
    exact = (values * operands.factors).to(dtype).t()
    assert torch.equal(ring_out, exact) and torch.equal(few_out, exact) and torch.equal(lone_out, exact)


@pytest.mark.parametrize("form", [*NIBBLES, *BYTES, FLOATS], ids=name)
@pytest.mark.parametrize(("n", "k"), [(13, 1152), (8, 384)])
def test_elements_are_widened(
    n: int, k: int, form: Form, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    operands = Operands(1, n, k, form, None, device, dtype)
    out = widen(*operands.codes, torch.empty(n, k, device=device, dtype=dtype))
    assert_close(out, reference.dequantized(operands.weight).to(dtype))
