"""Products of weight-only matrices with norm, residual and gate, whatever a plan or a size chooses."""

import pytest
import torch
from torch import Tensor

from common.kernels.base.gpu import Gpu, gpu_of
from common.ops import reference
from common.ops.base import Activation, Norm, Residual, Weight, pack, scale_bytes
from common.ops.linear import FusedLinear
from common.ops.linear_plan import LinearPlans
from common.ops.packed_linear import PackedLinear

GPU = Gpu("interpreter", (8, 6), 4, 99 << 10)
FLOATS = (4, 16, False)
FORMS = pytest.mark.parametrize(
    ("bits", "group", "has_offsets"), [(4, 128, False), (4, 32, True), (8, 16, False), FLOATS]
)
NEAR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative error of the whole
CPU, CUDA = ("cpu", torch.float32), ("cuda", torch.bfloat16)


def made(
    rows: int, columns: int, form: tuple[int, int, bool], device: str, dtype: torch.dtype, *, has_bias: bool = False
) -> Weight:
    bits, group, has_offsets = form
    shape = rows, columns // group
    factors = None
    codes = torch.randint(0, 16, (rows, columns)) if bits == 4 else torch.randint(-128, 128, (rows, columns))
    scales = (10.0 ** (torch.rand(shape) - 2) / 2**bits).half().to(device)
    offsets = (-scales * 7).to(device) if has_offsets else None
    bias = torch.randn(rows).to(device, dtype) if has_bias else None
    data = pack(codes.to(torch.uint8 if bits == 4 else torch.int8))
    if form == FLOATS:
        scales, factors = scale_bytes(2.0 ** torch.randint(-8, 0, shape)).to(device), torch.rand(rows, 1).to(device)
    return Weight(data.to(device), bias, scales, dtype, offsets, bits == 8, factors)


def assert_near(ours: Tensor, law: Tensor, limit: float) -> None:
    assert ours.shape == law.shape and ours.dtype == law.dtype and torch.isfinite(ours).all()
    assert (ours.float() - law.float()).norm() < limit * law.float().norm()


@pytest.mark.parametrize(
    ("device", "dtype", "num_tokens"),
    [
        pytest.param(*CPU, 1, id="interpreter-1"),
        *(pytest.param(*CPU, count, id=f"interpreter-{count}", marks=pytest.mark.medium) for count in (5, 30, 70)),
        *(
            pytest.param(*CUDA, each, id=f"cuda-{each}", marks=pytest.mark.gpu)
            for each in (1, 5, 8, 9, 16, 33, 64, 65, 130, 1000, 1500)
        ),
    ],
)
@FORMS
def test_every_product_follows_the_law(
    num_tokens: int, bits: int, group: int, has_offsets: bool, device: str, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.manual_seed(num_tokens)
    monkeypatch.setattr("common.ops.packed_linear.WIDENED_ELEMENTS", 200 * 256)  # a head is widened in parts
    gpu = GPU if device == "cpu" else gpu_of(torch.device(device))
    hidden, inner = (256, 128) if device == "cpu" else (1024, 512)
    linear = FusedLinear(pdl=device == "cuda" and gpu.has_dependent_launch)  # as in a decode step
    products, form = PackedLinear(linear, LinearPlans(gpu)), (bits, group, has_offsets)
    qkv, gate_up = made(384, hidden, form, device, dtype), made(2 * inner, hidden, form, device, dtype)
    down, head = made(hidden, inner, form, device, dtype, has_bias=True), made(700, hidden, form, device, dtype)
    norm = Norm(torch.rand(hidden).to(device, dtype) + 0.5, 1e-6)
    rows, inputs = (torch.randn(num_tokens, width).to(device, dtype) for width in (hidden, inner))
    normed, limit = reference.rms_norm(rows, norm.weight, norm.eps), NEAR[dtype]
    assert_near(products.norm_linear(Residual(rows.clone()), norm, qkv), reference.linear(normed, qkv), limit)
    logits = products.logits(Residual(rows.clone()), norm, head)
    assert_near(logits, normed.float() @ reference.dequantized(head).t(), limit)
    gated = products.norm_gate_up(Residual(rows.clone()), norm, gate_up, Activation.SILU)
    assert_near(gated, reference.gate_mul(reference.linear(normed, gate_up), Activation.SILU), 2 * limit)
    product = reference.linear(inputs, down)
    assert_near(products.parts(inputs, down).sum(0).to(dtype), product, limit)
    added = products.linear_add(inputs, down, Residual(rows.clone()))
    whole = added.rows if added.parts is None else added.rows + added.parts.sum(0).to(dtype)
    assert_near(whole, rows + product, limit)


def test_without_plans_the_law_computes() -> None:
    products = PackedLinear(FusedLinear(norm=reference.rms_norm, gate=reference.gate_mul), None)
    weight, norm = made(64, 128, (4, 64, True), *CPU), Norm(torch.ones(128), 1e-6)
    rows = torch.randn(3, 128)
    law = reference.linear(reference.rms_norm(rows, norm.weight, norm.eps), weight)
    assert torch.equal(products.norm_linear(Residual(rows), norm, weight), law)
    assert torch.equal(products.logits(Residual(rows), norm, weight), law)
