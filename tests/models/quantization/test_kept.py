"""Matrices that stay in a checkpoint's own 8 bits: the same codes and scales, and the law of their products."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.models.decoder import Decoder
from common.models.held import read_model
from common.models.loader import load_model, model_bytes
from common.models.quantization import packed_part
from common.models.sizes import codes as codes_of
from common.ops.base import BLOCK
from tests.models.quantization.conftest import Written
from tests.models.test_decoder import CPU, Cache, errors, prompts
from tests.models.test_quantization import FLIPPED, Kept
from tests.support.forms import on_cpu
from tests.support.marks import first_then
from tests.support.packed_checkpoints import INT8_ROWS
from tests.support.packers import fp8_rows
from tests.support.quantized import quantized_inputs

STACKS = {
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "o": ["self_attn.o_proj"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}
BLOCKS = ("fp8-blocks", "fp8-blocks-bf16-scales", "fp8-blocks-ue8m0-scales", "fp8-compressed-blocks")
ROWS = (
    "fp8-static", "fp8-modelopt", "fp8-modelopt-rows", "fp8-compressed", "fp8-compressed-rows", "int8-compressed",
    "int8-rows",
)  # fmt: skip
SCALES = ("weight_scale_inv", "weight_scale")


def load(directory: Path, choice: str = "auto") -> tuple[Decoder, dict[str, Tensor]]:
    memory = Kept()
    config = read_model(directory, on_cpu(choice))
    model, loading = load_model(directory, config, max_len=512, dtype="float32", memory=memory)
    loading.wait()
    assert isinstance(model, Decoder)
    return model, memory.tensors


def same_bytes(ours: Tensor, file: Tensor) -> bool:
    return ours.dtype == file.dtype and torch.equal(ours.view(torch.uint8), file.view(torch.uint8))


def stored(tensors: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """The codes of a matrix, and its scale at every element, looked up one block at a time."""
    codes = tensors[f"{name}.weight"]
    [scales] = [tensors[f"{name}.{each}"] for each in SCALES if f"{name}.{each}" in tensors]
    grid, (rows, columns) = scales.float().reshape(scales.shape[0] if scales.dim() else 1, -1), codes.shape
    high = 1 if grid.shape[0] == rows else 128 if grid.shape[0] > 1 else rows
    wide = 128 if grid.shape[1] > 1 else columns
    of_each = torch.empty(rows, columns)
    for row in range(rows):
        for begin in range(0, columns, wide):
            of_each[row, begin : begin + wide] = grid[row // high, begin // wide]
    return codes, of_each


def at_each(codes: Tensor, scales: Tensor) -> Tensor:
    """The scale at every element of a stack in memory, looked up by its shape."""
    rows, columns = codes.shape
    high, wide = (1 if scales.shape[0] == rows else 128), (columns if scales.shape[1] == 1 else 128)
    of_rows = torch.stack([scales[row // high] for row in range(rows)])
    return torch.stack([of_rows[:, column // wide] for column in range(columns)], 1)


@pytest.mark.parametrize("elements", [packed_part.MAX_ELEMENTS, 2048])
@pytest.mark.parametrize("case", first_then(pytest.mark.medium, [*BLOCKS, *ROWS]))
def test_codes_and_scales_are_those_of_the_file(
    case: str, elements: int, written: Callable[[str], Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of `gate_up` begins inside a block of rows."""
    monkeypatch.setattr(packed_part, "MAX_ELEMENTS", elements)
    packed, _ = written(case)
    tensors = load_file(packed / "model.safetensors")
    model, ours = load(packed)
    assert len(model.config.kept) == 4 * len(model.config.layers)
    assert codes_of.BLOCK == BLOCK
    for number in range(len(model.config.layers)):
        for stack, parts in STACKS.items():
            codes, scales = ours[f"layers.{number}.{stack}"], ours[f"layers.{number}.{stack}_scales"]
            pieces = [stored(tensors, f"model.layers.{number}.{part}") for part in parts]
            assert same_bytes(codes, torch.cat([each.view(torch.uint8) for each, _ in pieces]).view(codes.dtype))
            assert scales.dtype == torch.float32
            assert torch.equal(at_each(codes, scales), torch.cat([of_each for _, of_each in pieces]))
    shapes = {stack: tuple(ours[f"layers.0.{stack}_scales"].shape) for stack in STACKS}
    if case in BLOCKS:
        assert shapes == {"qkv": (4, 2), "o": (2, 2), "gate_up": (640, 2), "down": (2, 3)}
    else:
        assert shapes == {"qkv": (512, 1), "o": (256, 1), "gate_up": (640, 1), "down": (256, 1)}


@pytest.mark.parametrize(
    ("case", "scheme", "columns"),
    first_then(
        pytest.mark.medium,
        [("fp8-blocks", "fp8", 128), ("int8-rows", "int8", 0), ("fp8-static", "fp8", 0)],
        is_row=True,
    ),
)
@torch.inference_mode()
def test_logits_are_those_of_products_of_the_codes(
    case: str, scheme: str, columns: int, written: Callable[[str], Written]
) -> None:
    import transformers

    packed, plain_directory = written(case)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        plain_directory, dtype="float32", attn_implementation="eager"
    )
    theirs, (model, _) = quantized_inputs(plain, scheme, columns), load(packed)
    cache, ragged = Cache(model, CPU), prompts(1, 37, 100)
    ours = model.forward(cache.batch([(ids, 0, cache.blocks(len(ids))) for ids in ragged]), cache.ops)
    expected, unquantized = (
        torch.cat([each(torch.tensor([ids])).logits[0] for ids in ragged]) for each in (theirs, plain)
    )
    effect, _ = errors(expected, unquantized)
    assert effect > 1e-3
    assert errors(ours, expected)[0] < FLIPPED * effect


@pytest.mark.parametrize("case", ["gptq-act-order", "mxfp8-compressed"])
def test_other_formats_are_made_plain(case: str, written: Callable[[str], Written]) -> None:
    packed, _ = written(case)
    assert read_model(packed, on_cpu("auto")).kept == ()


def test_floats_of_8_bits_for_inputs_of_16_bits_are_made_plain(packed: Callable[[str], Path]) -> None:
    directory = packed("fp8-blocks")
    table = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "exclude_modules": ["lm_head"]}
    assert read_model(directory, on_cpu("auto")).kept
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": table}))
    assert read_model(directory, on_cpu("auto")).kept == ()


def test_a_choice_makes_all_plain(written: Callable[[str], Written]) -> None:
    packed, plain = written("fp8-blocks")
    (_, ours), (_, expected) = load(packed, "plain"), load(plain)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())


def test_a_stack_of_several_formats_is_made_plain(
    packed: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    directory = packed("fp8-blocks")
    _, plain = load(directory, "plain")
    path, name = directory / "model.safetensors", "model.layers.1.self_attn.k_proj.weight"
    tensors = load_file(path)
    matrix = plain["layers.1.qkv"][256 : 256 + tensors[name].shape[0]]
    del tensors[f"{name}_scale_inv"]
    save_file(tensors | {name: matrix.clone()}, path)
    with caplog.at_level(logging.INFO, logger="common.models.loading.weights"):
        model, ours = load(directory)
    assert torch.equal(ours["layers.1.qkv"], plain["layers.1.qkv"]) and "layers.1.qkv_scales" not in ours
    assert len(model.config.kept) == 7
    [line] = [line for line in caplog.messages if "matrices" in line]
    assert "13 matrices in FP8" in line and ", 11 of 13 matrices stay in 8 bits" in line
    assert "others are made plain" in line


def test_codes_of_two_kinds_in_a_stack_are_made_plain(packed: Callable[[str], Path]) -> None:
    directory = packed("int8-rows")
    table: dict[str, Any] = json.loads(json.dumps(INT8_ROWS))
    table["config_groups"]["group_1"] = {
        "targets": [r"re:.*layers\.1\.self_attn\.k_proj"],
        "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    }
    path, module = directory / "model.safetensors", "model.layers.1.self_attn.k_proj"
    tensors = load_file(path)
    of_keys, matrix = fp8_rows(1)(tensors[f"{module}.weight"].float() * tensors[f"{module}.weight_scale"].float())
    save_file(tensors | {f"{module}.{name}": tensor for name, tensor in of_keys.items()}, path)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": table}))
    (model, ours), (_, plain) = load(directory), load(directory, "plain")
    assert torch.equal(ours["layers.1.qkv"], plain["layers.1.qkv"])
    assert torch.equal(ours["layers.1.qkv"][256:384], matrix)
    assert len(model.config.kept) == 7


def test_memory_is_that_of_codes(written: Callable[[str], Written]) -> None:
    packed, _ = written("fp8-blocks")
    kept, plain = (read_model(packed, on_cpu(choice)) for choice in ("auto", "plain"))
    codes = 2 * sum(rows * width for rows, width in ((512, 256), (256, 256), (640, 256), (256, 320)))
    saved = model_bytes(plain, "bfloat16") - model_bytes(kept, "bfloat16")
    assert 0.9 * codes < saved < codes
    assert plain.step_bytes(3, 2) - kept.step_bytes(3, 2) == pytest.approx(saved, abs=256 * len(kept.stacks()))
