"""Floats of 4 bits that stay packed: the elements they stand for are the file's, and so are the logits."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.base.errors import ModelError
from common.models.held import read_model
from common.models.quantization import floats, groups
from common.models.quantization.kept import EXPONENTS, OF_FLOATS
from common.models.sizes.codes import PAIRS
from common.ops.base import floats as law
from common.ops.base import packing
from common.ops.reference import dequantized
from tests.models.quantization.conftest import Written
from tests.models.quantization.test_integers import differing, elements
from tests.models.quantization.test_kept import load
from tests.models.quantization.test_models import write
from tests.models.test_decoder import CPU, Cache, errors, prompts
from tests.support.forms import on_cpu
from tests.support.packed_checkpoints import CASES, SIZES, Case, compressed
from tests.support.packers import FP4_VALUES

CASES_OF_FLOATS = ["nvfp4-modelopt", "nvfp4-compressed", "mxfp4-compressed"]
MATRICES = {"self_attn.o_proj": "o", "mlp.gate_proj": "gate_up"}
"""Matrices that begin a stack, by the module's name."""


def meant(tensors: dict[str, Tensor], module: str) -> Tensor:
    """What a file means by a matrix, in fp64: by loops over codes, as the formats' papers define them."""
    packed = tensors.get(f"{module}.weight_packed", tensors.get(f"{module}.weight"))
    scales, of_all = tensors[f"{module}.weight_scale"], 1.0
    assert packed is not None
    if f"{module}.weight_scale_2" in tensors:
        of_all = tensors[f"{module}.weight_scale_2"].double().item()
    elif f"{module}.weight_global_scale" in tensors:
        of_all = 1.0 / tensors[f"{module}.weight_global_scale"].double().item()
    of_groups = 2.0 ** (scales.double() - 127) if scales.dtype == torch.uint8 else scales.double()
    codes = torch.stack((packed % 16, packed // 16), -1).flatten(1).long()
    values = torch.tensor([*FP4_VALUES, *(-each for each in FP4_VALUES)], dtype=torch.double)[codes]
    return values * of_groups.repeat_interleave(codes.shape[1] // scales.shape[1], 1) * of_all


def strays(directory: Path) -> list[str]:
    """The names of matrices of which an element is further from the file's than the products in fp32 are rounded."""
    tensors, (model, _) = load_file(directory / "model.safetensors"), load(directory, "packed")
    ours, found = elements(model), list[str]()
    for number in range(len(model.layers)):
        for name, stack in MATRICES.items():
            expected = meant(tensors, f"model.layers.{number}.{name}")
            held = ours[f"{number}.{stack}"][: expected.shape[0]].double()
            if not ((held - expected).abs() <= expected.abs() * 3 * 2.0**-24).all():
                found.append(f"{number}.{stack}")
    return found


def change(directory: Path, tensor: str, changed: Callable[[Tensor], Tensor]) -> None:
    """Change a tensor of the first layer's o_proj."""
    path, name = directory / "model.safetensors", f"model.layers.0.self_attn.o_proj.{tensor}"
    tensors = load_file(path)
    save_file(tensors | {name: changed(tensors[name])}, path)


@pytest.mark.parametrize("case", CASES_OF_FLOATS)
def test_elements_are_those_of_the_file(case: str, written: Callable[[str], Written]) -> None:
    assert strays(written(case)[0]) == []


pack, spread, fill, scale_bytes = packing.pack, groups._spread, groups.Held.fill_floats, law.scale_bytes


def filled_with(factors: Callable[[Tensor], Tensor]) -> object:
    """What fills memory with other factors of rows."""
    return lambda held, rows: fill(held, rows._replace(factors=factors(rows.factors)))


MISSES: dict[str, tuple[object, str, object]] = {
    "nibbles swapped": (groups, "pack", lambda codes: (packed := pack(codes)) << 4 | packed >> 4),
    "scales of the next group": (groups, "_spread", lambda numbers, target: spread(numbers.roll(1, 1), target)),
    "scales of the next row": (groups, "_spread", lambda numbers, target: spread(numbers.roll(1, 0), target)),
    "the sign highest": (floats, "float_codes", lambda codes, scales: codes),
    "exponents off by one": (floats, "scale_bytes", lambda scales: scale_bytes(scales) + 8),
    "no factors": (groups.Held, "fill_floats", filled_with(torch.ones_like)),
    "factors the other way": (groups.Held, "fill_floats", filled_with(torch.reciprocal)),
}


@pytest.mark.parametrize("case", ["nvfp4-compressed", "mxfp4-compressed"])
@pytest.mark.parametrize("miss", MISSES)
def test_a_near_miss_stands_for_other_elements(
    miss: str, case: str, written: Callable[[str], Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, name, function = MISSES[miss]
    monkeypatch.setattr(place, name, function)
    assert strays(written(case)[0]) == ["0.o", "0.gate_up", "1.o", "1.gate_up"]


@pytest.mark.parametrize("case", CASES_OF_FLOATS)
@torch.inference_mode()
def test_logits_are_those_of_the_plain_model(case: str, written: Callable[[str], Written]) -> None:
    packed, plain = written(case)
    found = []
    for directory in (packed, plain):
        model, _ = load(directory, "packed")
        cache = Cache(model, CPU)
        batch = cache.batch([(ids, 0, cache.blocks(len(ids))) for ids in prompts(1, 37)])
        found.append(model.forward(batch, cache.ops))
    assert model.config.kept == ()
    assert errors(*found)[0] < (1e-3 if "modelopt" in case else 1e-2)  # the package rounds elements to bfloat16


def test_scales_below_and_at_0(packed: Callable[[str], Path]) -> None:
    """Signs of e4m3 go to codes, least numbers stay, and codes beside a scale of 0 are 0."""
    directory = packed("nvfp4-modelopt")

    def changed(scales: Tensor) -> Tensor:
        scales[0, :6] = torch.tensor([-1.5, 0.0, -0.0, 2.0**-9, -448.0, 7 * 2.0**-9]).to(scales.dtype)
        return scales

    change(directory, "weight_scale", changed)
    assert strays(directory) == []


@pytest.mark.parametrize("case", ["nvfp4-modelopt", "nvfp4-compressed"])
def test_a_matrix_without_its_scale_is_refused(case: str, packed: Callable[[str], Path]) -> None:
    directory = packed(case)
    path, tensors = directory / "model.safetensors", load_file(directory / "model.safetensors")
    name = "weight_scale_2" if "modelopt" in case else "weight_global_scale"
    del tensors[f"model.layers.0.self_attn.o_proj.{name}"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match=f"o_proj.{name} is missing, which NVFP4 needs"):
        load(directory, "packed")


@pytest.mark.parametrize("span", [EXPONENTS - 1, EXPONENTS])
def test_powers_of_two_too_far_from_each_other_are_made_plain(span: int, packed: Callable[[str], Path]) -> None:
    directory = packed("mxfp4-compressed")

    def changed(scales: Tensor) -> Tensor:
        scales[3, 1] = scales[3].max() - span
        return scales

    change(directory, "weight_scale", changed)
    assert ("layers.0.o" in dict(read_model(directory, on_cpu("packed")).kept)) == (span < EXPONENTS)
    if span < EXPONENTS:
        assert strays(directory) == []


def test_floats_and_integers_have_no_form_in_common(tmp_path: Path) -> None:
    floats_, integers = CASES["nvfp4-compressed"](), compressed("W4A16", group_size=32)
    config = json.loads(json.dumps(floats_.config))
    [group] = json.loads(json.dumps(integers.config["config_groups"])).values()
    config["config_groups"]["group_1"] = group | {"targets": ["re:.*[kv]_proj$"], "format": integers.config["format"]}
    config["config_groups"] = dict(reversed(config["config_groups"].items()))

    def pack_in_turn(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return (integers if matrix.shape[0] == 128 else floats_).pack(matrix)

    packed, plain = write("qwen3-untied", Case(config, pack_in_turn), tmp_path, SIZES)
    held = dict(read_model(packed, on_cpu("packed")).kept)
    assert "layers.0.qkv" not in held and held["layers.0.o"] == OF_FLOATS
    assert PAIRS not in {form.dtype for form in held.values()}
    assert differing(packed, plain, is_rounded=True) == []


@torch.inference_mode()
def test_a_head_of_floats_stays_packed(tmp_path: Path) -> None:
    case = CASES["nvfp4-compressed"]()
    packed, _ = write("qwen3-untied", Case(case.config | {"ignore": []}, case.pack), tmp_path, SIZES)
    path, name = packed / "model.safetensors", "lm_head.weight"
    tensors = load_file(path)
    of_head, matrix = case.pack(tensors.pop(name))
    save_file(tensors | {name.removesuffix("weight") + each: tensor for each, tensor in of_head.items()}, path)
    model, held = load(packed, "packed")
    assert held["lm_head"].dtype == torch.uint8 and held["lm_head_factors"].shape == (300, 1)
    assert torch.equal(dequantized(model.lm_head).bfloat16(), matrix.bfloat16())
