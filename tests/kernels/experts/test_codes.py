"""Experts in codes of 8 bits against their law: products of all sizes, and of a lone token."""

from itertools import cycle
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from common.base.activation import Activation
from common.kernels.base.codes import elements_of, readable
from common.kernels.base.expert_operands import ExpertMatrix
from common.kernels.base.expert_operands import Form as HeldForm
from common.kernels.base.gpu import Gpu
from common.kernels.experts import lone_codes
from common.kernels.experts.tiles import ExpertTiles, expert_tiles
from common.ops import reference
from common.ops.base import ExpertWeights, Residual
from common.ops.cuda_experts import CudaExperts
from tests.kernels.conftest import AssertClose, gpu_at
from tests.kernels.experts.test_products import computed, make_routing

FP8, INT8 = torch.float8_e4m3fn, torch.int8
NUM, HIDDEN = 3, 200  # rows and columns that neither blocks nor tiles fill


class Form(NamedTuple):
    """What shares a scale."""

    codes: torch.dtype
    rows: int
    columns: int  # 0: all
    inner: int  # width of experts; whole blocks of rows, where gate and up have blocks


FORMS = [
    Form(FP8, 128, 128, 256),
    Form(INT8, 1, 0, 72),
    Form(FP8, 1, 0, 72),
    Form(FP8, 1, 128, 136),
    Form(FP8, 128, 128, 128),  # of which down has one group of columns
]


def matrix(form: Form, n: int, k: int, device: torch.device, bias: torch.dtype | None = None) -> ExpertMatrix:
    """Scales differ by orders of magnitude, so that one in a wrong place shows."""
    codes = torch.randint(-127, 128, (NUM, n, k), dtype=torch.int8)
    if form.codes == FP8:
        codes = codes.float().div(64.0).to(FP8)
    shape = (NUM, -(-n // form.rows), -(-k // form.columns) if form.columns else 1)
    scales = 10.0 ** (torch.rand(shape) * 2.0 - 2.5) / (1.0 if form.codes == FP8 else 64.0)
    of_rows = None if bias is None else torch.randn(NUM, n).to(device, bias)
    return ExpertMatrix(codes.to(device), scales.to(device), of_rows)


def read(gpu: Gpu, gate_up: ExpertMatrix, down: ExpertMatrix) -> tuple[ExpertMatrix, ExpertMatrix]:
    """The matrices as kernels read them."""
    data = [readable(each.data, has_e4m3=gpu.has_e4m3) for each in (gate_up, down)]
    return gate_up._replace(data=data[0]), down._replace(data=data[1])


def weights_of(gate_up: ExpertMatrix, down: ExpertMatrix, activation: Activation) -> ExpertWeights:
    biases, scales = (gate_up.bias, down.bias), (gate_up.scales, down.scales)
    return ExpertWeights(gate_up.data, down.data, activation, *biases, *scales)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5, *(pytest.param(num, marks=pytest.mark.gpu) for num in (140, 1030))])
def test_products_equal_the_law(
    num_tokens: int, form: Form, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    activation, gpu = Activation.CLAMPED_SWIGLU, gpu_at(device)
    x, routing = torch.randn(num_tokens, HIDDEN).to(device, dtype), make_routing(num_tokens, NUM, 2, device)
    gate_up = matrix(form, 2 * form.inner, HIDDEN, device, dtype)
    down = matrix(form, HIDDEN, form.inner, device, dtype)
    law = reference.experts(x, routing, weights_of(gate_up, down, activation)).to(dtype)
    chosen = expert_tiles(num_tokens, 2, NUM, x.element_size(), gpu, HeldForm.BYTES)
    for tiles in (chosen, ExpertTiles(16, 64, 64, 64, 2, 4)):  # of two in a group
        assert_close(computed(x, *read(gpu, gate_up, down), routing, activation, tiles), law)


@pytest.mark.parametrize(("form", "has_bias"), [(FORMS[0], False), *zip(FORMS, cycle([True, False]), strict=False)])
def test_a_lone_token_equals_the_law(
    form: Form,
    has_bias: bool,
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of more tiles than are on the way at once; an expert that the token has in no slot is NaN."""
    if has_bias:
        monkeypatch.setattr(lone_codes, "GATE_STAGES", 1)
        monkeypatch.setattr(lone_codes, "DOWN_STAGES", 2)
    bias = dtype if has_bias else None
    gate_up = matrix(form, 2 * form.inner, HIDDEN, device, bias)
    down = matrix(form, HIDDEN, form.inner, device, bias)
    weights = weights_of(gate_up, down, Activation.SILU)
    x, rows = torch.randn(2, 1, HIDDEN).to(device, dtype)
    routing = make_routing(1, NUM, 2, device)
    law = (rows + reference.experts(x, routing, weights)).to(dtype)
    [unused] = {0, 1, 2} - set(routing.experts[0].tolist())
    for each in (gate_up, down):
        assert each.scales is not None
        each.scales[unused] = torch.nan
    added = CudaExperts(gpu_at(device), is_reference=False, pdl=False).add(x, routing, weights, Residual(rows))
    assert added.parts is None
    assert_close(added.rows, law)


@pytest.mark.parametrize("num_tokens", [1, 4, pytest.param(130, marks=pytest.mark.gpu)])
def test_padding_has_no_experts(num_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
    form = FORMS[0]
    gate_up, down = matrix(form, 2 * form.inner, HIDDEN, device), matrix(form, HIDDEN, form.inner, device)
    x, rows = torch.randn(2, num_tokens, HIDDEN).to(device, dtype)
    routing = make_routing(num_tokens, NUM, 2, device)
    routing.experts.fill_(-1), routing.weights.zero_()
    layer, kept = CudaExperts(gpu_at(device), is_reference=False, pdl=False), rows.clone()
    added = layer.add(x, routing, weights_of(gate_up, down, Activation.SILU), Residual(rows))
    assert torch.equal(added.rows, kept) and (added.parts is None or not added.parts.any())


@triton.jit  # type: ignore[untyped-decorator]
def _widen(codes, out, size: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, size)
    tl.store(out + at, elements_of(tl.load(codes + at), out.dtype.element_ty))


@pytest.mark.parametrize("codes", [FP8, INT8], ids=str)
def test_every_code_is_widened_exactly(codes: torch.dtype, device: torch.device, dtype: torch.dtype) -> None:
    every = torch.arange(256).to(torch.uint8).view(codes)
    if codes == FP8:
        every = every[(every.view(torch.uint8) & 0x7F) != 0x7F].repeat(2)[:256]  # without NaN
    forms = [every] if codes == INT8 or not gpu_at(device).has_e4m3 else [every, every.view(torch.uint8)]
    for form in forms:
        out = torch.full((256,), torch.nan, device=device, dtype=dtype)
        _widen[(1,)](readable(form, has_e4m3=gpu_at(device).has_e4m3).to(device), out, 256)
        assert torch.equal(out.float().cpu(), every.float())


def test_a_grid_of_scales_on_its_side_is_refused_or_shows(
    device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    """A square grid has the shape of its transpose."""
    form, x, routing = Form(FP8, 128, 128, 128), torch.randn(5, 256).to(device, dtype), make_routing(5, NUM, 2, device)
    gate_up, down = matrix(form, 256, 256, device), matrix(form, 256, 128, device)
    assert gate_up.scales is not None and down.scales is not None
    weights = weights_of(gate_up, down, Activation.SILU)
    law = reference.experts(x, routing, weights).to(dtype)
    turned = gate_up._replace(scales=gate_up.scales.mT.contiguous())
    gpu, tiles = gpu_at(device), ExpertTiles(16, 64, 128, 64, 2, 4)
    with pytest.raises(AssertionError):
        assert_close(computed(x, *read(gpu, turned, down), routing, Activation.SILU, tiles), law)
    with pytest.raises(AssertionError, match="scales"):
        down._replace(scales=down.scales.mT.contiguous()).check_codes(is_gated=False)
