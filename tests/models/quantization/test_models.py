"""Quantized models compute what transformers computes with the same weights made plain, experts included."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import formats
from common.base.errors import ModelError
from deploy.bench.results import read_rows
from tests.models.quantization.test_formats import load
from tests.models.test_decoder import CPU, Cache, assert_close, prompts
from tests.models.test_decoder import load as load_decoder
from tests.support import packers
from tests.support.checkpoints import write_checkpoint
from tests.support.marks import first_then
from tests.support.packed_checkpoints import CASES, EXPERTS, FP8, SIZES, STATIC, Case, kimi, pack_checkpoint

OF_EXPERTS = [
    *(("qwen3-moe", case) for case in EXPERTS),
    ("qwen3.5-moe", "fp8-blocks"),
    ("qwen3.5-moe", "nvfp4-modelopt"),
    ("qwen3-next", "fp8-blocks"),
    ("deepseek-v2-lite", "fp8-blocks"),
    ("deepseek-v3", "fp8-blocks"),
    ("deepseek-v3", "awq"),
]
DENSE = [("qwen3-untied", case) for case in ("fp8-blocks", "fp8-static", "awq", "gptq-act-order", "nvfp4-modelopt")]


def write(variant: str, case: Case, directory: Path, sizes: dict[str, Any] | None = None) -> tuple[Path, Path]:
    """Write a packed checkpoint and the same made plain."""
    packed, plain = directory / "packed", directory / "plain"
    for each in (packed, plain):
        each.mkdir()
    write_checkpoint(variant, packed, sizes=sizes)
    pack_checkpoint(packed, plain, case)
    return packed, plain


def same_logits(packed: Path, plain: Path) -> None:
    """Compare with transformers on the plain checkpoint, at every position of prompts in one batch."""
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype="float32", attn_implementation="eager")
    model = load_decoder(packed)
    cache, asked = Cache(model), prompts(1, 37, 120)
    batch = cache.batch([(ids, 0, cache.blocks(len(ids))) for ids in asked])
    ours = model.forward(batch, cache.ops)
    assert_close(ours, torch.cat([theirs(torch.tensor([ids])).logits[0] for ids in asked]), CPU)


@pytest.mark.parametrize(("variant", "case"), first_then(pytest.mark.medium, DENSE, is_row=True))
@torch.inference_mode()
def test_logits_of_dense_models_equal_transformers(variant: str, case: str, tmp_path: Path) -> None:
    same_logits(*write(variant, CASES[case](), tmp_path, SIZES))


@pytest.mark.parametrize(("variant", "case"), first_then(pytest.mark.medium, OF_EXPERTS, is_row=True))
@torch.inference_mode()
def test_logits_of_models_with_experts_equal_transformers(variant: str, case: str, tmp_path: Path) -> None:
    packed, plain = write(variant, EXPERTS[case](), tmp_path)
    ours, expected = load(packed), load(plain)
    assert [name for name, tensor in expected.items() if not torch.equal(ours[name], tensor)] == []
    same_logits(packed, plain)


@pytest.mark.parametrize(
    "case",
    [
        EXPERTS["fp8-blocks"](),
        Case(FP8 | STATIC, packers.fp8_whole("weight_scale_inv", 1, 1, input_scale="activation_scale")),
    ],
    ids=["blocks", "whole"],
)
@torch.inference_mode()
def test_experts_that_a_tensor_has_stacked_may_be_quantized(case: Case, tmp_path: Path) -> None:
    """Each expert has scales of its own; those of activations lie beside them."""
    packed, plain = write("mistral4", case, tmp_path)
    ours, expected = load(packed), load(plain)
    assert [name for name, tensor in expected.items() if not torch.equal(ours[name], tensor)] == []
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    save_file(tensors | {f"{name}_scale_inv": tensors[f"{name}_scale_inv"][:-1]}, packed / "model.safetensors")
    with pytest.raises(ModelError, match=r"experts\.down_proj_scale_inv is \[7, \d, \d\], .* say \[8, \d, \d\]"):
        load(packed)


@torch.inference_mode()
def test_experts_alone_may_be_quantized(tmp_path: Path) -> None:
    packed, plain = write("deepseek-v3", kimi(), tmp_path)
    ours, expected = load(packed), load(plain)
    assert [name for name, each in expected.items() if not torch.equal(ours[name].bfloat16(), each.bfloat16())] == []


@pytest.mark.medium
def test_formats_are_as_far_from_floats_as_their_bits_allow(tmp_path: Path) -> None:
    """The bundled model's next tokens; the benchmark leaves rows of bits, divergence and agreement."""
    results = tmp_path / "results.csv"
    argv = ["--formats", "int8-compressed,nvfp4-modelopt", "--texts", "2", "--length", "32", "--results", str(results)]
    assert formats.main(argv) == 0
    found = {(row.workload.partition(",")[0], row.figure): row.value for row in read_rows(results)}
    assert found["int8-compressed", "format_bits"] < 8.1 and found["nvfp4-modelopt", "format_bits"] < 4.6
    assert 0.0 < found["int8-compressed", "format_divergence"] < found["nvfp4-modelopt", "format_divergence"] < 0.1
    assert found["int8-compressed", "format_agreement"] > 0.9
