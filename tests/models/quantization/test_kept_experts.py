"""Experts that stay in a checkpoint's own 8 bits: its codes and scales, and logits of the matrices made plain."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.models.decoder import Decoder
from common.models.held import read_model
from common.models.loader import load_model, model_bytes
from common.ops.base import Weight
from common.ops.reference.products import dequantized
from tests.models.quantization.test_kept import at_each, load, same_bytes, stored
from tests.models.test_decoder import BACKENDS, CPU, Backend, Cache, OwnWeights, assert_close, prompts
from tests.support.checkpoints import write_checkpoint
from tests.support.forms import on_cpu
from tests.support.marks import first_then
from tests.support.packed_checkpoints import FP8, INT8_ROWS, STATIC, UNEVEN, Case, pack_checkpoint
from tests.support.packers import fp8_blocks, fp8_whole, int8_rows

WIDE: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64, "num_hidden_layers": 2}
"""Experts whose gates are whole blocks of rows."""
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 128, "num_hidden_layers": 4}
BLOCKS = Case(FP8 | {"modules_to_not_convert": UNEVEN}, fp8_blocks())
DENSE = r".*(self_attn|linear_attn|mlp\.(gate|up|down)_proj)"
"""Modules that are left plain, so that nothing but experts has codes."""
OF_EXPERTS = BLOCKS._replace(left=DENSE)
WHOLE = Case(FP8 | STATIC, fp8_whole("weight_scale_inv", 1, 1, input_scale="activation_scale"), DENSE)
INT8 = Case(INT8_ROWS | {"ignore": ["lm_head", f"re:{DENSE}"]}, int8_rows, DENSE)


class Kept(NamedTuple):
    """A checkpoint with experts."""

    variant: str
    sizes: dict[str, Any]
    case: Case
    scales: tuple[int, int]  # of an expert's gate and up


KEPT = {
    "blocks": Kept("qwen3-moe", WIDE, OF_EXPERTS, (2, 2)),
    "blocks by row": Kept("qwen3-moe", WIDE | {"moe_intermediate_size": 96}, OF_EXPERTS, (192, 2)),
    "a shared MLP": Kept("qwen3.5-moe", WIDE | SHARED, OF_EXPERTS, (2, 2)),
    "rows": Kept("qwen3-moe", {}, INT8, (64, 1)),
    "stacked": Kept("mistral4", {"hidden_size": 128, "moe_intermediate_size": 128}, OF_EXPERTS, (2, 1)),
    "stacked, by row": Kept("mistral4", {}, OF_EXPERTS, (64, 1)),
    "stacked, of a whole matrix": Kept("mistral4", {}, WHOLE, (64, 1)),
}


def write(kept: Kept, tmp_path: Path) -> tuple[Path, Path]:
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    for each in (packed, plain):
        each.mkdir()
    write_checkpoint(kept.variant, packed, sizes=kept.sizes)
    pack_checkpoint(packed, plain, kept.case)
    return packed, plain


def logits(model: Decoder, backend: Backend, ragged: list[list[int]]) -> Tensor:
    cache = Cache(model, backend)
    return model.forward(cache.batch([(ids, 0, cache.blocks(len(ids))) for ids in ragged]), cache.ops)


Matrices = list[tuple[Tensor, Tensor]]
STACKED = {"weight": "", "weight_scale": "_scale_inv"}
"""Ends of names of a matrix's tensors, and of those of stacked matrices."""


def of_experts(tensors: dict[str, Tensor]) -> tuple[Matrices, Matrices]:
    """The codes of gate and up, and of down, of each expert of the first layer, with the scale at every element."""
    mlp, gate_up, down = "model.layers.0.mlp", Matrices(), Matrices()
    for side, found in (("gate_up_proj", gate_up), ("down_proj", down)):
        for number in range(8 if f"{mlp}.experts.{side}" in tensors else 0):
            one = {f"m.{end}": tensors[f"{mlp}.experts.{side}{of}"][number] for end, of in STACKED.items()}
            found.append(stored(one, "m"))
    names = [f"experts.{number}" for number in range(8)] + ["shared_expert", "shared_experts"]
    for name in (f"{mlp}.{each}" for each in names if f"{mlp}.{each}.down_proj.weight" in tensors):
        gate_up += [stored(tensors, f"{name}.{side}_proj") for side in ("gate", "up")]
        down.append(stored(tensors, f"{name}.down_proj"))
    return gate_up, down


@pytest.mark.parametrize("name", first_then(pytest.mark.medium, list(KEPT)))
@torch.inference_mode()
def test_codes_are_those_of_the_file_and_logits_of_what_they_mean(name: str, tmp_path: Path) -> None:
    kept = KEPT[name]
    packed, _ = write(kept, tmp_path)
    tensors, (model, ours) = load_file(packed / "model.safetensors"), load(packed)
    for stack, pieces in zip(("experts_gate_up", "experts_down"), of_experts(tensors), strict=True):
        codes, scales = ours[f"layers.0.{stack}"], ours[f"layers.0.{stack}_scales"]
        assert same_bytes(codes, torch.cat([each.view(torch.uint8) for each, _ in pieces]).view(codes.dtype))
        assert torch.equal(at_each(codes, scales), torch.cat([of_each for _, of_each in pieces]))
    weights = model.layers[0][1].weights  # type: ignore[union-attr]
    assert weights.gate_up_scales is not None and weights.gate_up_scales.shape[1:] == kept.scales
    plain, _ = load(packed, "plain")
    assert plain.config.kept == () and len(model.config.kept) == 2 * sum("experts_down_scales" in each for each in ours)
    assert_close(logits(model, CPU, prompts(1, 37, 100)), logits(plain, CPU, prompts(1, 37, 100)), CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [each for each in BACKENDS if each.id != "cpu"])
@pytest.mark.parametrize("name", KEPT)
@torch.inference_mode()
def test_logits_of_a_gpu_are_those_of_plain_matrices(name: str, backend: Backend, tmp_path: Path) -> None:
    """A prompt of one token, a few tokens, and many."""
    packed, _ = write(KEPT[name], tmp_path)
    models = [(Backend("cpu", "float32", 0.0, 0.0), "plain"), (backend, "plain"), (backend, "auto")]
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


def test_a_grid_of_scales_on_its_side_shows(tmp_path: Path) -> None:
    """A square grid has the shape of its transpose, so nothing but the numbers tells."""
    kept = KEPT["blocks"]
    packed, plain_directory = write(kept._replace(sizes=WIDE | {"moe_intermediate_size": 256}), tmp_path)
    path = packed / "model.safetensors"
    tensors, plain = load_file(path), load_file(plain_directory / "model.safetensors")
    name = "model.layers.0.mlp.experts.3.down_proj.weight"

    def meant() -> Tensor:
        _, ours = load(packed)
        matrix = Weight(ours["layers.0.experts_down"], None, ours["layers.0.experts_down_scales"])
        return dequantized(matrix).view(8, 256, 256)[3]

    assert torch.equal(meant(), plain[name])
    save_file(tensors | {f"{name}_scale_inv": tensors[f"{name}_scale_inv"].t().contiguous()}, path)
    assert not torch.allclose(meant(), plain[name], rtol=0.1)


def test_experts_for_inputs_of_16_bits_stay_and_dense_matrices_do_not(tmp_path: Path) -> None:
    table = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "exclude_modules": ["lm_head"]}
    packed, _ = write(KEPT["blocks"]._replace(case=Case(table, fp8_blocks())), tmp_path)
    config = read_model(packed, on_cpu("auto"))
    assert {name.rpartition(".")[2] for name, _ in config.kept} == {"experts_gate_up", "experts_down"}


@pytest.mark.parametrize("plain_side", ["gate", "down"])
def test_all_matrices_of_a_layer_s_experts_stay_or_none(plain_side: str, tmp_path: Path) -> None:
    packed, plain = write(KEPT["blocks"], tmp_path)
    path, name = packed / "model.safetensors", f"model.layers.0.mlp.experts.5.{plain_side}_proj.weight"
    tensors, made = load_file(path), load_file(plain / "model.safetensors")
    del tensors[f"{name}_scale_inv"]
    save_file(tensors | {name: made[name]}, path)
    model, ours = load(packed)
    kept = {name for name, _ in model.config.kept if "experts" in name}
    assert kept == set(), "of two layers, one has a dense MLP"
    expected = torch.cat([made[f"model.layers.0.mlp.experts.{number}.down_proj.weight"] for number in range(8)])
    assert torch.equal(ours["layers.0.experts_down"], expected)


def test_memory_and_steps_are_those_of_codes(tmp_path: Path) -> None:
    packed, _ = write(KEPT["blocks"]._replace(case=BLOCKS), tmp_path)
    kept, plain = (read_model(packed, on_cpu(choice)) for choice in ("auto", "plain"))
    expert, read = 3 * 128 * 256, 8 * (1.0 - (1.0 - 3 / 8) ** 5)  # of eight, by five tokens with three each
    dense = sum(2 * rows * 256 for rows in (512, 256)) + 2 * 96 * 256 + 256 * 96
    saved = model_bytes(plain, "bfloat16") - model_bytes(kept, "bfloat16")
    assert saved == pytest.approx(8 * expert + dense, rel=0.01)
    assert plain.weight_bytes(2) - kept.weight_bytes(2) == pytest.approx(saved, abs=256 * len(kept.stacks()))
    assert plain.step_bytes(5, 2) - kept.step_bytes(5, 2) == pytest.approx(read * expert + dense, rel=0.01)
    assert kept.activation_bytes(0, 0) == 2 * 2 * 512 * 256, "the largest dense matrix, and no experts, made plain"
