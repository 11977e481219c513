"""Experts that stay packed in 4 bits: the elements that they stand for, logits, bytes, and near misses."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from torch import Tensor

from common.models.decoder import Decoder
from common.models.forms import Target, forms_on
from common.models.held import read_model
from common.models.layers.experts import ExpertsPart
from common.models.loader import load_model, model_bytes
from common.models.loading import upload
from common.models.quantization import dequantize, groups, packed_part
from common.models.sizes.codes import PAIRS, Codes
from common.models.sizes.quantized import is_of_experts
from common.ops.base import pack, pack_quarters
from common.ops.reference.experts import elements_of
from tests.models.quantization.test_integers import rounded
from tests.models.quantization.test_kept import load
from tests.models.quantization.test_kept_experts import DENSE, OF_EXPERTS, Kept, logits, write
from tests.models.test_decoder import BACKENDS, CPU, Backend, OwnWeights, assert_close, prompts
from tests.support import packers
from tests.support.checkpoints import write_checkpoint
from tests.support.forms import on_cpu
from tests.support.gguf_files import every, write_gguf
from tests.support.marks import first_then
from tests.support.packed_checkpoints import AWQ, GPTQ, Case, awq_128, compressed

HALF, SINGLE = "float16", "float32"
WIDE: dict[str, Any] = {
    "hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64, "num_hidden_layers": 2, "mlp_only_layers": [],
}  # fmt: skip
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 128, "num_hidden_layers": 4}


class Packed(NamedTuple):
    """A checkpoint with experts, and the form in which gate and up of each layer are held."""

    variant: str
    sizes: dict[str, Any]
    case: Callable[[], Case]
    form: Codes | None
    is_rounded: bool = False  # what the packer means is in bfloat16


def compressed_experts(preset: str, **weights: object) -> Case:
    case = compressed(preset, **weights)
    return Case(case.config | {"ignore": ["lm_head", f"re:{DENSE}"]}, case.pack, DENSE)


FOUND: dict[str, Packed] = {
    "awq": Packed("qwen3-moe", WIDE, awq_128, Codes(PAIRS, 1, 128, SINGLE, SINGLE)),
    "gptq": Packed("qwen3-moe", WIDE, lambda: Case(GPTQ, packers.gptq(4, 32)), Codes(PAIRS, 1, 32, SINGLE, SINGLE)),
    "compressed-tensors": Packed(
        "qwen3-moe", WIDE, partial(compressed_experts, "W4A16", group_size=32), Codes(PAIRS, 1, 32, HALF), True
    ),
    "with zeros": Packed(
        "qwen3-moe",
        WIDE,
        partial(compressed_experts, "W4A16_ASYM", group_size=64),
        Codes(PAIRS, 1, 64, SINGLE, SINGLE),
        is_rounded=True,
    ),
    "a scale a row": Packed(
        "qwen3-moe",
        WIDE,
        lambda: Case(GPTQ | {"group_size": -1, "checkpoint_format": "marlin"}, packers.marlin(0)),
        Codes(PAIRS, 1, 256, HALF),
    ),
    "a shared MLP": Packed(
        "qwen3.5-moe",
        WIDE | SHARED,
        lambda: Case(AWQ, packers.awq(64), DENSE),
        Codes(PAIRS, 1, 64, SINGLE, SINGLE),
    ),
    "columns in any order": Packed(
        "qwen3-moe", WIDE, lambda: Case(GPTQ | {"desc_act": True}, packers.gptq(4, 32, scattered=True)), None
    ),
    "8 bits in groups": Packed("qwen3-moe", WIDE, partial(compressed_experts, "W8A16", group_size=64), None, True),
    "small groups": Packed("qwen3-moe", WIDE, lambda: Case(AWQ | {"group_size": 16}, packers.awq(16)), None),
}


def written(name: str, tmp_path: Path) -> tuple[Path, Path]:
    found = FOUND[name]
    return write(Kept(found.variant, found.sizes, found.case(), (0, 0)), tmp_path)


def experts(model: Decoder) -> dict[str, Tensor]:
    """What the matrices of each layer's experts stand for, in fp32: `[num, n, k]`."""
    found = dict[str, Tensor]()
    for number, (_, part) in enumerate(model.layers):
        if not isinstance(part, ExpertsPart):
            continue
        for name, matrix in (("gate_up", part.weights.gate_up_matrix), ("down", part.weights.down_matrix)):
            is_plain, num = matrix.scales is None, matrix.data.shape[0]
            found[f"{number}.{name}"] = (
                matrix.data.float() if is_plain else torch.stack([elements_of(matrix, each) for each in range(num)])
            )
    return found


def differing(packed: Path, plain: Path, *, is_rounded: bool) -> list[str]:
    """The names of matrices with other elements than plain ones, which a package may have rounded to bfloat16."""
    (model, _), (other, _) = load(packed, "packed"), load(plain)
    ours, expected = experts(model), experts(other)
    if is_rounded:
        ours, expected = ({name: each.bfloat16() for name, each in all_.items()} for all_ in (ours, expected))
    return [name for name, tensor in expected.items() if not torch.equal(ours[name], tensor)]


@pytest.mark.parametrize("name", first_then(pytest.mark.medium, list(FOUND)))
@torch.inference_mode()
def test_elements_and_logits_are_those_that_the_packer_means(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_part, "MAX_ELEMENTS", 64 * 256)  # a piece of rows at a time
    packed, plain = written(name, tmp_path)
    form, held = FOUND[name].form, dict(read_model(packed, on_cpu("packed")).kept)
    assert {each: held.get(f"layers.{each}.experts_gate_up") for each in range(2)} == dict.fromkeys(range(2), form)
    assert ("layers.1.experts_down" in held) == (form is not None)
    assert differing(packed, plain, is_rounded=FOUND[name].is_rounded) == []
    (model, _), (other, _) = load(packed, "packed"), load(packed, "plain")
    assert_close(logits(model, CPU, prompts(1, 37)), logits(other, CPU, prompts(1, 37)), CPU)


unpacked, spread = dequantize._unpacked, groups._spread
MISSES: dict[str, tuple[object, str, object]] = {
    "nibbles swapped": (groups, "pack_quarters", lambda codes: (held := pack_quarters(codes)) << 4 | held >> 4),
    "dense order": (groups, "pack_quarters", pack),
    "zeros off by one": (dequantize, "_unpacked", lambda words, *a: unpacked(words, *a) + (words.shape[0] < 32)),
    "scales in reverse": (groups, "_spread", lambda numbers, target: spread(numbers.flip(1), target)),
    "scales of the next row": (groups, "_spread", lambda numbers, target: spread(numbers.roll(1, 0), target)),
}


@pytest.mark.parametrize("miss", MISSES)
def test_a_near_miss_stands_for_other_elements(miss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, plain = written("gptq", tmp_path)
    place, name, function = MISSES[miss]
    monkeypatch.setattr(place, name, function)
    assert len(differing(packed, plain, is_rounded=False)) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [each for each in BACKENDS if each.id != "cpu"])
@pytest.mark.parametrize("name", ["awq", "gptq", "compressed-tensors", "a shared MLP"])
@torch.inference_mode()
def test_logits_of_a_gpu_are_those_of_plain_matrices(name: str, backend: Backend, tmp_path: Path) -> None:
    """A prompt of one token, a few tokens, and many."""
    packed, _ = written(name, tmp_path)
    models = [(Backend("cpu", "float32", 0.0, 0.0), "plain"), (backend, "plain"), (backend, "packed")]
    for ragged in (prompts(1), prompts(7), prompts(1, 37, 100)):
        found = []
        for each, choice in models:
            config, memory = read_model(packed, on_cpu(choice)), OwnWeights(each.device)
            model, loading = load_model(packed, config, max_len=512, dtype=each.dtype, memory=memory)
            loading.wait()
            assert isinstance(model, Decoder)
            found.append(logits(model, each, ragged).float().cpu())
        exact, plain, kept = found
        assert_close(kept, exact, backend, rounded=plain)


def test_memory_and_steps_are_those_of_codes(tmp_path: Path) -> None:
    packed, _ = written("awq", tmp_path)
    kept, plain = (read_model(packed, on_cpu(choice)) for choice in ("packed", "plain"))
    of_experts = [name for name, _ in kept.kept if is_of_experts(name)]
    assert len(of_experts) == 4
    expert, read = 3 * 128 * 256, 8 * (1.0 - (1.0 - 3 / 8) ** 5)  # of eight, by five tokens with three each
    dense = sum(form.columns > 0 for name, form in kept.kept if name not in of_experts)
    assert dense == 4
    narrow = 0.5 + 8 / 128
    of_attention = 2 * (512 * 256 + 256 * 256)
    saved = model_bytes(plain, "bfloat16") - model_bytes(kept, "bfloat16")
    assert saved == pytest.approx((2 - narrow) * (16 * expert + of_attention), rel=0.01)
    assert plain.weight_bytes(2) - kept.weight_bytes(2) == pytest.approx(saved, abs=256 * len(kept.stacks()))
    read_less = plain.step_bytes(5, 2) - kept.step_bytes(5, 2)
    assert read_less == pytest.approx((2 - narrow) * (2 * read * expert + of_attention), rel=0.01)
    assert kept.widening_bytes(2) == pytest.approx((2 * 2 + narrow - 2) * of_attention, rel=0.01), "no experts"
    assert kept.activation_bytes(0, 0) == 2 * 2 * 512 * 256, "the largest dense matrix, and no experts, made plain"


def test_a_gpu_holds_experts_in_4_bits_by_itself(tmp_path: Path) -> None:
    """A layer's experts stay if all of their matrices do; of groups below 128 on Hopper alone."""
    for name, on_hopper, on_ada in (("awq", 4, 4), ("a shared MLP", 8, 0)):
        directory = tmp_path / name
        directory.mkdir()
        packed, _ = written(name, directory)
        for capability, expected in (((9, 0), on_hopper), ((8, 9), on_ada)):
            forms = forms_on(Target(capability), "auto")
            assert sum(is_of_experts(name) for name, _ in read_model(packed, forms).kept) == expected


def assert_rounded(path: Path) -> None:
    """That experts quantized to 4 bits at load are what the file means, rounded, in groups of 128."""
    (plain, _), (made, tensors) = load(path, "plain"), load(path, "int4")
    ours, expected = experts(made), experts(plain)
    assert len(expected) == sum(is_of_experts(name) and name.endswith("_scales") for name in tensors) > 0
    for name, tensor in expected.items():
        assert torch.equal(ours[name], torch.stack([rounded(each) for each in tensor])), name


SIZES: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128}
SOURCES: dict[str, tuple[str, dict[str, Any], str]] = {
    "one by one": ("qwen3-moe", SIZES | {"num_hidden_layers": 3}, "experts.2.up_proj.weight"),
    "stacked": ("mistral4", SIZES, "experts.gate_up_proj"),
    "shared of several": ("deepseek-v2-lite", SIZES, "shared_experts.down_proj.weight"),
}


@pytest.mark.parametrize("source", first_then(pytest.mark.medium, list(SOURCES)))
def test_experts_are_rounded_to_4_bits_at_load(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "SLOT_BYTES", 9_000)
    variant, sizes, end = SOURCES[source]
    write_checkpoint(variant, tmp_path, sizes=sizes)
    assert any(name.endswith(end) for name in load_file(tmp_path / "model.safetensors"))
    assert_rounded(tmp_path)


def test_rows_that_groups_do_not_fill_keep_a_layer_s_experts_plain(tmp_path: Path) -> None:
    write_checkpoint("qwen3-moe", tmp_path, sizes=WIDE | {"moe_intermediate_size": 96})
    _, tensors = load(tmp_path, "int4")
    assert "layers.0.qkv_scales" in tensors and not any("experts" in name and "scales" in name for name in tensors)


def test_stacked_experts_of_8_bits_are_rounded_anew(tmp_path: Path) -> None:
    packed, _ = write(Kept("mistral4", SIZES, OF_EXPERTS, (0, 0)), tmp_path)
    assert_rounded(packed)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0], ids=lambda kind: kind.name)
def test_experts_of_gguf_files_stay_packed_in_4_bits(kind: Type, tmp_path: Path) -> None:
    write_checkpoint("qwen3-moe", tmp_path, sizes=WIDE)
    path = write_gguf(tmp_path / "model.gguf", tmp_path, every(kind))
    (model, tensors), (plain, _) = load(path, "packed"), load(path, "plain")
    assert (tensors["layers.1.experts_down"].dtype == torch.uint8) == (kind is not Type.Q8_0)
    expected = experts(plain)
    for name, tensor in experts(model).items():
        assert torch.equal(tensor, expected[name])
