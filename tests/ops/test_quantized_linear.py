"""Products of quantized matrices with norm, residual and gate, whatever kernel a plan or a size chooses."""

import pytest
import torch
from torch import Tensor

from common.kernels.base.gpu import Gpu, gpu_of
from common.ops import reference
from common.ops.base import BLOCK, Activation, Norm, Residual, Weight
from common.ops.code_products import Codes, multiply
from common.ops.linear import FusedLinear
from common.ops.linear_plan import LinearPlans, PromptPlans
from common.ops.quantized_linear import QuantizedLinear

CODES = pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.int8], ids=["fp8", "int8"])
FORMS = pytest.mark.parametrize("form", ["rows", "blocks", "columns"])
GPU = Gpu("interpreter", (8, 6), 4, 99 << 10)
NEAR = {torch.float32: 1e-3, torch.bfloat16: 1e-2}  # relative error of the whole; a number may take either of two codes
UNQUANTIZED = 0.04  # of a product in codes beside one of activations as they are


def made(
    rows: int, columns: int, codes: torch.dtype, form: str, device: str, dtype: torch.dtype, *, has_bias: bool = False
) -> Weight:
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    shape = {"rows": (rows, 1), "blocks": blocks, "columns": (rows, blocks[1])}[form]
    matrix, _ = reference.quantize(torch.randn(rows, columns), codes)
    scales = 10.0 ** (torch.rand(shape) - 3.0) / reference.products.LARGEST[Weight(matrix).scheme]
    bias = torch.randn(rows).to(device, dtype) if has_bias else None
    return Weight(matrix.to(device), bias, scales.to(device), dtype)


def assert_near(ours: Tensor, law: Tensor, limit: float) -> None:
    assert ours.shape == law.shape and ours.dtype == law.dtype and torch.isfinite(ours).all()
    assert (ours.float() - law.float()).norm() < limit * law.float().norm()


CPU, CUDA = ("cpu", torch.float32), ("cuda", torch.bfloat16)


@pytest.mark.parametrize(
    ("device", "dtype", "num_tokens"),
    [
        pytest.param(*CPU, 5, id="interpreter-5"),
        pytest.param(*CPU, 64, id="interpreter-64", marks=pytest.mark.medium),
        *(
            pytest.param(*CUDA, each, id=f"cuda-{each}", marks=pytest.mark.gpu)
            for each in (1, 5, 33, 64, 65, 130, 1000)
        ),
    ],
)
@CODES
@FORMS
def test_every_product_follows_the_law(
    num_tokens: int, form: str, codes: torch.dtype, device: str, dtype: torch.dtype
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    check(num_tokens, form, codes, device, dtype)


@pytest.mark.parametrize(("form", "codes"), [("rows", torch.int8), ("blocks", torch.float8_e4m3fn)])
def test_many_tokens_are_multiplied_by_libraries(form: str, codes: torch.dtype) -> None:
    check(70, form, codes, *CPU)


@pytest.mark.parametrize("form", ["blocks", "columns"])
def test_matrices_may_be_widened_a_few_rows_at_a_time(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.ops.code_products.WIDENED_ELEMENTS", 1)  # blocks of rows one by one
    weight = made(300, 320, torch.float8_e4m3fn, form, *CPU)
    codes, scales = reference.quantize(torch.randn(150, 320), torch.float8_e4m3fn, BLOCK)
    product = multiply(Codes(codes, scales), weight, GPU)
    assert_near(product, reference.products.multiplied(codes, scales, weight), 1e-5)


@pytest.mark.parametrize(
    ("device", "dtype", "num_tokens"),
    [
        pytest.param(*CPU, 70, id="interpreter-70"),
        pytest.param(*CPU, 5, id="interpreter-5", marks=pytest.mark.medium),
        *(pytest.param(*CUDA, each, id=f"cuda-{each}", marks=pytest.mark.gpu) for each in (1, 5, 16, 64, 65, 200)),
    ],
)
@CODES
def test_logits_are_in_fp32_for_any_number_of_tokens(
    num_tokens: int, codes: torch.dtype, device: str, dtype: torch.dtype
) -> None:
    """By the plans of decode steps, and by those of prompts, which leave a few tokens to libraries."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.manual_seed(num_tokens)
    gpu = GPU if device == "cpu" else gpu_of(torch.device(device))
    head, norm = made(200, 256, codes, "rows", device, dtype), Norm(torch.rand(256).to(device, dtype) + 0.5, 1e-6)
    rows = torch.randn(num_tokens, 256).to(device, dtype)
    normed = reference.rms_norm(rows, norm.weight, norm.eps)
    law = normed.float() @ reference.products.dequantized(head).t()
    if num_tokens > 1:
        tokens, scales = reference.quantize(normed, codes)
        law = reference.products.multiplied(tokens, scales, head)
    for plans in (LinearPlans(gpu), PromptPlans(LinearPlans(gpu))):
        products = QuantizedLinear(FusedLinear(pdl=device == "cuda" and gpu.has_dependent_launch), gpu, plans)
        assert_near(products.logits(Residual(rows.clone()), norm, head), law, NEAR[dtype])


def check(num_tokens: int, form: str, codes: torch.dtype, device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(num_tokens)
    gpu = GPU if device == "cpu" else gpu_of(torch.device(device))
    hidden, inner = (256, 128) if device == "cpu" else (1024, 512)
    linear = FusedLinear(pdl=device == "cuda" and gpu.has_dependent_launch)  # as in a decode step
    products = QuantizedLinear(linear, gpu, LinearPlans(gpu))
    options = (codes, form, device, dtype)
    qkv, gate_up = made(384, hidden, *options), made(2 * inner, hidden, *options)
    down = made(hidden, inner, *options, has_bias=True)
    norm = Norm(torch.rand(hidden).to(device, dtype) + 0.5, 1e-6)
    rows, inputs = (torch.randn(num_tokens, width).to(device, dtype) for width in (hidden, inner))
    normed = reference.rms_norm(rows, norm.weight, norm.eps)
    limit = NEAR[dtype] if num_tokens > 1 else UNQUANTIZED  # gemv takes activations as they are
    assert_near(products.norm_linear(Residual(rows.clone()), norm, qkv), reference.linear(normed, qkv), limit)
    gated = products.norm_gate_up(Residual(rows.clone()), norm, gate_up, Activation.SILU)
    assert_near(gated, reference.gate_mul(reference.linear(normed, gate_up), Activation.SILU), 2 * limit)
    product = reference.linear(inputs, down)
    parts = products.parts(inputs, down)
    assert_near(parts.sum(0).to(dtype), product, limit)
    added = products.linear_add(inputs, down, Residual(rows.clone()))
    whole = added.rows if added.parts is None else added.rows + added.parts.sum(0).to(dtype)
    assert_near(whole, rows + product, limit)


def test_without_plans_the_law_computes() -> None:
    products = QuantizedLinear(FusedLinear(norm=reference.rms_norm, gate=reference.gate_mul), GPU, None)
    weight, norm = made(64, 96, torch.int8, "rows", "cpu", torch.float32), Norm(torch.ones(96), 1e-6)
    rows = torch.randn(3, 96)
    law = reference.linear(reference.rms_norm(rows, norm.weight, norm.eps), weight)
    assert torch.equal(products.norm_linear(Residual(rows), norm, weight), law)
