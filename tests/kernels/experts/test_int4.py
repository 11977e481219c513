"""Experts in codes of 4 bits against their elements in float64: products of all sizes, and of a lone token."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from common.base.activation import Activation
from common.kernels.base.expert_operands import ExpertMatrix, Form, Routing
from common.kernels.experts.tiles import ExpertTiles, expert_tiles
from common.ops import reference
from common.ops.base import BLOCK, ExpertWeights, Residual, pack_quarters, unpack_quarters
from common.ops.cuda_experts import CudaExperts
from tests.kernels.conftest import AssertClose, gpu_at
from tests.kernels.experts.test_layer import whole
from tests.kernels.experts.test_products import computed, make_routing

NUM, HIDDEN, INNER = 3, 384, 128  # rows of three blocks, whose last has no neighbour, and of a single one


class Groups(NamedTuple):
    """What shares a scale, and how scales are held."""

    columns: int  # 0: the whole row
    scales: torch.dtype
    has_offsets: bool


FORMS = [
    Groups(128, torch.float16, has_offsets=False),
    Groups(128, torch.float32, has_offsets=True),
    Groups(32, torch.float32, has_offsets=True),
    Groups(32, torch.float16, has_offsets=False),
    Groups(64, torch.float16, has_offsets=True),
    Groups(0, torch.float32, has_offsets=False),
]


class Made(NamedTuple):
    """A matrix of each expert as kernels have it, and what its elements are."""

    held: ExpertMatrix
    elements: Tensor  # float64 [num, n, k]


def packed(codes: Tensor) -> Tensor:
    """Codes `[num, n, k]` by the definition: a number of 16 bits has a column of each quarter of a block."""
    numbers = torch.zeros(*codes.shape[:2], codes.shape[2] // 4, dtype=torch.int32)
    for column in range(codes.shape[2]):
        block, within = divmod(column, 128)
        quarter, place = divmod(within, 32)
        numbers[..., block * 32 + place] |= codes[..., column].int() << 4 * quarter
    return numbers.to(torch.uint16).view(torch.uint8)


def make(form: Groups, n: int, k: int, device: torch.device, bias: torch.dtype | None = None) -> Made:
    """Scales differ by orders of magnitude, so that one in a wrong place shows; zeros are as AWQ has them."""
    columns = form.columns or k
    codes, zeros = torch.randint(16, (NUM, n, k), dtype=torch.uint8), torch.randint(4, 12, (NUM, n, k // columns))
    scales = (10.0 ** (torch.rand(NUM, n, k // columns) * 2.0 - 3.0)).to(form.scales)
    of_zeros = zeros.double() if form.has_offsets else torch.full_like(scales, 8.0, dtype=torch.float64)
    offsets = (-zeros * scales.float()).to(form.scales) if form.has_offsets else None
    shifts = -of_zeros * scales.double() if offsets is None else offsets.double()
    elements = codes.double() * scales.double().repeat_interleave(columns, 2) + shifts.repeat_interleave(columns, 2)
    of_rows = None if bias is None else torch.randn(NUM, n).to(device, bias)
    of_groups = None if offsets is None else offsets.to(device)
    held = ExpertMatrix(packed(codes).to(device), scales.to(device), of_rows, of_groups, is_int4=True)
    return Made(held, elements.to(device))


def pair(form: Groups, device: torch.device, bias: torch.dtype | None = None) -> tuple[Made, Made]:
    return make(form, 2 * INNER, HIDDEN, device, bias), make(form, HIDDEN, INNER, device, bias)


def expected(x: Tensor, routing: Routing, gate_up: Made, down: Made) -> Tensor:
    """The weighted sum of SwiGLU experts in float64, one pair at a time; what lies between is as `x` has it."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, slot in torch.argwhere(routing.experts >= 0).tolist():
        expert = int(routing.experts[token, slot])
        both = gate_up.elements[expert] @ x[token].double() + _bias(gate_up, expert)
        gate, up = both.chunk(2)
        inner = (gate * torch.sigmoid(gate) * up).to(x.dtype).double()
        made = down.elements[expert] @ inner + _bias(down, expert)
        out[token] += routing.weights[token, slot].double() * made
    return out.to(x.dtype)


def _bias(made: Made, expert: int) -> Tensor:
    return torch.zeros((), device=made.elements.device) if made.held.bias is None else made.held.bias[expert].double()


def weights_of(gate_up: ExpertMatrix, down: ExpertMatrix) -> ExpertWeights:
    biases, scales = (gate_up.bias, down.bias), (gate_up.scales, down.scales)
    offsets = (gate_up.offsets, down.offsets)
    return ExpertWeights(gate_up.data, down.data, Activation.SILU, *biases, *scales, *offsets)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("num_tokens", [5, 1, *(pytest.param(num, marks=pytest.mark.gpu) for num in (40, 140, 1030))])
def test_products_equal_sums_of_elements(
    num_tokens: int, form: Groups, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    (gate_up, down), activation = pair(form, device, dtype), Activation.SILU
    x, routing = torch.randn(num_tokens, HIDDEN).to(device, dtype), make_routing(num_tokens, NUM, 2, device)
    sums = expected(x, routing, gate_up, down)
    assert_close(reference.experts(x, routing, weights_of(gate_up.held, down.held)).to(dtype), sums)
    chosen = expert_tiles(num_tokens, 2, NUM, x.element_size(), gpu_at(device), Form.INT4)
    for tiles in (chosen, ExpertTiles(16, 64, 64, BLOCK, 2, 4)):
        assert_close(computed(x, gate_up.held, down.held, routing, activation, tiles), sums)


@pytest.mark.parametrize("num_tokens", [1, 9, *(pytest.param(num, marks=pytest.mark.gpu) for num in (130, 1030))])
@pytest.mark.parametrize("form", FORMS[:3], ids=str)
def test_a_layer_reads_no_expert_that_no_token_has(
    form: Groups, num_tokens: int, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    """Scales and offsets of the last expert are NaN; every third token is padding, and stays as it is."""
    gate_up, down = pair(form, device)
    x, rows = torch.randn(2, num_tokens, HIDDEN).to(device, dtype)
    routing = make_routing(num_tokens, NUM - 1, 2, device)
    sums = (rows + expected(x, routing, gate_up, down)).to(dtype)
    for each in (gate_up.held, down.held):
        for numbers in (each.scales, each.offsets):
            if numbers is not None:
                numbers[-1] = torch.nan
    layer, kept = CudaExperts(gpu_at(device), is_reference=False, pdl=False), rows.clone()
    weights = weights_of(gate_up.held, down.held)
    [added, again] = [whole(layer.add(x, routing, weights, Residual(rows.clone()))) for _ in range(2)]
    assert_close(added, sums)
    assert torch.equal(added[2::3], kept[2::3]) and torch.equal(added, again)


def test_a_lone_row_of_padding_stays(device: torch.device, dtype: torch.dtype) -> None:
    gate_up, down = pair(FORMS[1], device)
    x, rows = torch.randn(2, 1, HIDDEN).to(device, dtype)
    routing = Routing(torch.full((1, 2), -1, dtype=torch.int32, device=device), torch.zeros(1, 2, device=device))
    layer = CudaExperts(gpu_at(device), is_reference=False, pdl=False)
    added = layer.add(x, routing, weights_of(gate_up.held, down.held), Residual(rows.clone()))
    assert torch.equal(whole(added), rows)


def swapped(matrix: ExpertMatrix) -> ExpertMatrix:
    return matrix._replace(data=(matrix.data >> 4) | (matrix.data << 4))


def other_bytes(matrix: ExpertMatrix) -> ExpertMatrix:
    return matrix._replace(data=matrix.data.view(*matrix.data.shape[:2], -1, 2).flip(-1).flatten(2))


def one_more(matrix: ExpertMatrix) -> ExpertMatrix:
    assert matrix.offsets is not None and matrix.scales is not None
    return matrix._replace(offsets=matrix.offsets - matrix.scales)


def next_group(matrix: ExpertMatrix) -> ExpertMatrix:
    assert matrix.scales is not None
    return matrix._replace(scales=matrix.scales.roll(1, 2))


@pytest.mark.parametrize("change", [swapped, other_bytes, one_more, next_group])
@pytest.mark.parametrize("side", ["gate_up", "down"])
def test_codes_zeros_and_scales_in_a_wrong_place_show(
    side: str, change: object, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    assert callable(change)
    gate_up, down = pair(FORMS[2], device)
    x, routing = torch.randn(5, HIDDEN).to(device, dtype), make_routing(5, NUM, 2, device)
    sums, tiles = expected(x, routing, gate_up, down), ExpertTiles(16, 32, 64, BLOCK, 2, 4)
    given = [change(each.held) if name == side else each.held for name, each in (("gate_up", gate_up), ("down", down))]
    with pytest.raises(AssertionError):
        assert_close(computed(x, given[0], given[1], routing, Activation.SILU, tiles), sums)


def test_quarters_are_packed_as_defined(device: torch.device) -> None:
    codes = torch.randint(16, (7, 384), dtype=torch.uint8)
    held = pack_quarters(codes.to(device))
    assert torch.equal(held.cpu(), packed(codes[None])[0])
    assert torch.equal(unpack_quarters(held).cpu(), codes)


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 6])
def test_other_groups_are_refused(groups: int, device: torch.device) -> None:
    """Of 384 columns: one, three or six, and none that are no multiple of a block, its half or its quarter."""
    matrix = make(FORMS[0], 16, HIDDEN, device).held
    other = matrix._replace(scales=torch.ones(NUM, 16, groups, device=device))
    if groups in (1, 3, 6):
        other.check(torch.float32, is_gated=False)
    else:
        with pytest.raises(AssertionError, match="groups"):
            other.check(torch.float32, is_gated=False)
