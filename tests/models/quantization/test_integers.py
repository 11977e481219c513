"""Integers that stay packed: the elements they stand for are the file's, and so are the logits; near misses are not."""

import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.models.decoder import Decoder
from common.models.held import read_model
from common.models.layers.attention import AttentionPart
from common.models.layers.mlp import MLPPart
from common.models.layers.tensors import weight_of
from common.models.loader import load_model
from common.models.loading import upload
from common.models.quantization import dequantize, groups, packed_part
from common.models.quantization.kept import OF_FLOATS
from common.models.sizes.codes import PAIRS, Codes
from common.ops.base import packing
from common.ops.reference import dequantized
from tests.models.quantization.conftest import Written
from tests.models.quantization.test_kept import load
from tests.models.quantization.test_models import write
from tests.models.test_decoder import CPU, Backend, Cache, errors, prompts
from tests.models.test_quantization import Kept
from tests.support import packers
from tests.support.checkpoints import write_checkpoint
from tests.support.forms import on_cpu
from tests.support.packed_checkpoints import GPTQ, INT8_ROWS, SIZES, Case, compressed, pack_checkpoint

HALF, SINGLE = "float16", "float32"
FORMS = {
    "int8-compressed-asymmetric": Codes("int8", 1, 256, SINGLE, SINGLE),
    "int8-compressed-packed": Codes("int8", 1, 64, HALF),
    "int8-compressed-packed-rows": Codes("int8", 1, 256, HALF),
    "int4-compressed": Codes(PAIRS, 1, 32, HALF),
    "int4-compressed-asymmetric": Codes(PAIRS, 1, 64, SINGLE, SINGLE),
    "awq": Codes(PAIRS, 1, 64, SINGLE, SINGLE),
    "gptq": Codes(PAIRS, 1, 32, SINGLE, SINGLE),
    "gptq-v2": Codes(PAIRS, 1, 32, SINGLE, SINGLE),
    "gptq-int8": Codes("int8", 1, 256, SINGLE, SINGLE),
    "marlin": Codes(PAIRS, 1, 64, HALF),
    "marlin-rows": Codes(PAIRS, 1, 256, HALF),
    "nvfp4-modelopt": OF_FLOATS,
    "nvfp4-compressed": OF_FLOATS,
    "mxfp4-compressed": OF_FLOATS,
}
"""Form of the matrices of 256 columns. Those of 320 stay packed with codes of 8 bits alone."""


def elements(model: Decoder) -> dict[str, Tensor]:
    """What the matrices of a model stand for."""
    found = dict[str, Tensor]()
    for number, (mixer, mlp) in enumerate(model.layers):
        assert isinstance(mixer, AttentionPart) and isinstance(mlp, MLPPart)
        of_layer = {"qkv": mixer.qkv, "o": mixer.out.weight, "gate_up": mlp.gate_up, "down": mlp.out.weight}
        found |= {f"{number}.{name}": dequantized(weight) for name, weight in of_layer.items()}
    return found


def differing(directory: Path, plain: Path, *, is_rounded: bool) -> list[str]:
    """The names of matrices that stand for other elements than plain ones; a package may round them to bfloat16."""
    (packed, _), (model, _) = load(directory, "packed"), load(plain)
    ours, expected = elements(packed), elements(model)
    if is_rounded:
        ours, expected = ({name: each.bfloat16() for name, each in all_.items()} for all_ in (ours, expected))
    return [name for name, tensor in expected.items() if not torch.equal(ours[name], tensor)]


@pytest.mark.parametrize("case", FORMS)
def test_elements_are_those_that_the_packer_means(
    case: str, written: Callable[[str], Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of rows at a time, too."""
    monkeypatch.setattr(packed_part, "MAX_ELEMENTS", 64 * 256)
    packed, plain = written(case)
    held = dict(read_model(packed, on_cpu("packed")).kept)
    assert held["layers.1.qkv"] == held["layers.0.gate_up"] == FORMS[case]
    assert ("layers.1.down" in held) == (FORMS[case].dtype == "int8")
    assert differing(packed, plain, is_rounded="compressed" in case) == []


pack, unpacked, spread = packing.pack, dequantize._unpacked, groups._spread
MISSES: dict[str, tuple[object, str, object]] = {
    "nibbles swapped": (groups, "pack", lambda codes: (packed := pack(codes)) << 4 | packed >> 4),
    "zeros off by one": (dequantize, "_unpacked", lambda words, *a: unpacked(words, *a) + (words.shape[0] < 32)),
    "scales in reverse": (groups, "_spread", lambda numbers, target: spread(numbers.flip(1), target)),
    "scales of the next row": (groups, "_spread", lambda numbers, target: spread(numbers.roll(1, 0), target)),
}


@pytest.mark.parametrize("miss", MISSES)
def test_a_near_miss_stands_for_other_elements(
    miss: str, written: Callable[[str], Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, name, function = MISSES[miss]
    monkeypatch.setattr(place, name, function)
    packed, plain = written("awq")
    assert {name.partition(".")[2] for name in differing(packed, plain, is_rounded=False)} >= {"qkv", "gate_up", "o"}


@pytest.mark.parametrize("case", ["gptq", "gptq-int8"])
@torch.inference_mode()
def test_logits_are_those_of_the_plain_model(case: str, written: Callable[[str], Written]) -> None:
    found = []
    for directory in written(case):
        model, _ = load(directory, "packed")
        cache = Cache(model, CPU)
        batch = cache.batch([(ids, 0, cache.blocks(len(ids))) for ids in prompts(1, 37)])
        found.append(model.forward(batch, cache.ops))
    assert errors(*found)[0] < 1e-3


@torch.inference_mode()
def test_rows_that_lie_between_those_of_gates_stay_packed(tmp_path: Path) -> None:
    """A piece takes rows out of the middle of a matrix."""
    case = Case(GPTQ | {"bits": 8, "group_size": -1}, packers.gptq(8, 0))
    packed, _ = write("qwen3.5", case, tmp_path)
    (model, tensors), (_, plain) = load(packed, "packed"), load(packed, "plain")
    kept = dict(model.config.kept)
    assert {name.split(".")[-1] for name in kept} == {"qkv", "gate", "o", "gate_up"}
    assert [name for name in kept if not torch.equal(dequantized(weight_of(tensors, kept, name)), plain[name])] == []


@pytest.mark.gpu
@pytest.mark.parametrize("choice", ["packed", "int4"])
@pytest.mark.parametrize("case", ["awq", "gptq-int8", "marlin", "nvfp4-modelopt"])
@torch.inference_mode()
def test_a_gpu_holds_the_same_bytes_and_has_the_logits(
    case: str, choice: str, written: Callable[[str], Written]
) -> None:
    packed, _ = written(case)
    model, expected = load(packed, choice)
    memory, backend, cpu = Kept(), Backend("cuda:0", "bfloat16", 0.0, 0.0), Cache(model, CPU)
    memory.device = backend.device
    loaded, loading = load_model(packed, model.config, max_len=512, dtype=backend.dtype, memory=memory)
    loading.wait()
    held = [name for name, stack in model.config.stacks().items() if stack.form is not None]
    assert held and all(torch.equal(memory.tensors[name].cpu(), expected[name]) for name in held)
    assert isinstance(loaded, Decoder)
    cache = Cache(loaded, backend)
    for asked in (prompts(1), prompts(7), prompts(1, 37, 100)):
        ours = loaded.forward(cache.batch([(ids, 0, cache.blocks(len(ids))) for ids in asked]), cache.ops)
        law = model.forward(cpu.batch([(ids, 0, cpu.blocks(len(ids))) for ids in asked]), cpu.ops)
        assert errors(ours, law)[0] < 0.03


def test_matrices_of_a_stack_are_held_in_the_widest_of_their_forms(tmp_path: Path) -> None:
    """Groups of 32 and 128, with and without zeros, codes of 4 and 8 bits: 8 bits, groups of 32 and offsets in fp32."""
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    for each in (packed, plain):
        each.mkdir()
    write_checkpoint("qwen3-untied", packed, sizes=SIZES, dtype=torch.bfloat16)
    kinds = {
        "q_proj": compressed("W4A16", group_size=32),
        "k_proj": compressed("W4A16_ASYM", group_size=128),
        "v_proj": compressed("W8A16", group_size=64),
    }
    other = compressed("W4A16", group_size=64)
    table = other.config
    for number, (name, case) in enumerate(kinds.items(), 1):
        [group] = json.loads(json.dumps(case.config["config_groups"])).values()
        table["config_groups"][f"group_{number}"] = group | {"targets": [f"re:.*{name}$"]}
    names = [name.split(".")[-2] for name in load_file(packed / "model.safetensors") if "_proj." in name]
    turns = iter([kinds.get(name, other) for name in names])
    pack_checkpoint(packed, plain, Case(table, lambda matrix: next(turns).pack(matrix)))
    held = dict(read_model(packed, on_cpu("packed")).kept)
    assert held["layers.1.qkv"] == Codes("int8", 1, 32, SINGLE, SINGLE) and held["layers.1.o"].dtype == PAIRS
    assert differing(packed, plain, is_rounded=True) == []


def test_scales_that_float16_would_round_are_held_in_fp32(packed: Callable[[str], Path]) -> None:
    directory = packed("int4-compressed")
    path, name = directory / "model.safetensors", "model.layers.1.mlp.up_proj.weight_scale"
    tensors = load_file(path)
    tensors[name][3, 1] = 1.5 * 2.0**-24
    save_file(tensors, path)
    held = dict(read_model(directory, on_cpu("packed")).kept)
    assert held["layers.1.gate_up"].scale_dtype == SINGLE and held["layers.0.gate_up"].scale_dtype == HALF
    [(model, _), (plain, _)] = load(directory, "packed"), load(directory, "plain")
    assert torch.equal(elements(model)["1.gate_up"], elements(plain)["1.gate_up"])


@torch.inference_mode()
def test_a_head_of_integers_stays_packed(tmp_path: Path) -> None:
    case = compressed("W4A16", group_size=32)
    packed, _ = write("qwen3-untied", Case(case.config | {"ignore": []}, case.pack), tmp_path, SIZES)
    path, name = packed / "model.safetensors", "lm_head.weight"
    tensors = load_file(path)
    of_head, matrix = case.pack(tensors.pop(name))
    save_file(tensors | {name.removesuffix("weight") + each: tensor for each, tensor in of_head.items()}, path)
    model, held = load(packed, "packed")
    assert held["lm_head"].dtype == torch.uint8 and held["embed"].dtype == torch.float32
    assert torch.equal(dequantized(model.lm_head).bfloat16(), matrix.bfloat16())


@pytest.mark.parametrize("table", ["in order", "scattered", "none"])
def test_a_table_of_groups_keeps_a_matrix_plain_only_if_columns_are_out_of_order(table: str, tmp_path: Path) -> None:
    """Of compressed-tensors; old files have a table of -1 for none."""

    def pack(matrix: Tensor) -> packers.Packed:
        tensors, plain = packers.packed_rows(4, 32, scattered=table == "scattered")(matrix)
        if table == "in order":
            tensors["weight_g_idx"] = (torch.arange(matrix.shape[1]) // 32).int()
        return tensors, plain

    config = compressed("W4A16_ASYM", group_size=32).config
    packed, plain = write("qwen3-untied", Case(config, pack), tmp_path, SIZES)
    assert bool(read_model(packed, on_cpu("packed")).kept) == (table != "scattered")
    assert differing(packed, plain, is_rounded=False) == []


@pytest.mark.parametrize("case", ["gptq", "gptq-act-order"])
def test_the_log_says_what_stays_packed_and_what_does_not(
    case: str, written: Callable[[str], Written], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="common.models"):
        load(written(case)[0], "packed")
    if case == "gptq":
        assert "12 of 14 matrices stay packed; others are made plain as they are loaded" in caplog.text
        assert "products are in the checkpoint's codes: 6 in INT4 in groups of 32, by" in caplog.text
    else:
        assert "14 of them because their columns are in any order (act order)" in caplog.text
        assert "stay packed" not in caplog.text


def rounded(matrix: Tensor) -> Tensor:
    """The elements of a matrix rounded to 4 bits in groups of 128, one group at a time."""
    found = torch.zeros_like(matrix)
    for row, column in itertools.product(range(matrix.shape[0]), range(0, matrix.shape[1], 128)):
        group = matrix[row, column : column + 128]
        scale = float(np.float16(group[group.abs().argmax()].item() / -8))
        codes = (group / scale).round().clamp(-8, 7) if scale else torch.zeros(128)
        found[row, column : column + 128] = codes * scale
    return found


@pytest.mark.parametrize("case", ["plain", "awq"])
def test_rows_are_rounded_to_4_bits_at_load(
    case: str, written: Callable[[str], Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a plain file, or from what a quantized one means; rows that groups of 128 do not fill stay plain."""
    monkeypatch.setattr(upload, "SLOT_BYTES", 9_000)
    packed, plain = written("awq")
    directory = plain if case == "plain" else packed
    (model, tensors), (other, _) = load(directory, "int4"), load(plain)
    ours, expected = elements(model), elements(other)
    assert [name for name in ours if name.endswith("down") != torch.equal(ours[name], expected[name])] == []
    assert torch.equal(ours["1.qkv"], rounded(expected["1.qkv"]))
    assert torch.equal(ours["0.o"], rounded(expected["0.o"]))
    assert tensors["layers.0.qkv"].dtype == torch.uint8 and tensors["layers.0.qkv_scales"].dtype == torch.float16


def test_bytes_without_inputs_of_8_bits_stay_and_leave_inputs_as_they_are(
    packed: Callable[[str], Path], written: Callable[[str], Written]
) -> None:
    directory, (_, plain) = packed("int8-rows"), written("int8-rows")
    table: dict[str, Any] = json.loads(json.dumps(INT8_ROWS))
    table["config_groups"]["group_0"]["input_activations"] = None
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": table}))
    assert dict(read_model(directory, on_cpu("packed")).kept)["layers.0.qkv"] == Codes("int8", 1, 256, HALF)
    assert differing(directory, plain, is_rounded=False) == []
