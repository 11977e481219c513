"""A checkpoint in 16 bits whose products are quantized when it is loaded."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from common.base.errors import ModelError
from common.models.decoder import Decoder
from common.models.loader import load_model, model_bytes
from common.models.reading import read_config
from common.models.sizes.quantized import is_quantized
from common.settings.config import HEADS, QUANTIZATIONS
from common.wire.values.fingerprint import chosen_fingerprint, model_fingerprint
from tests.models.test_decoder import CPU, Backend, Cache, OwnWeights, errors, prompts, rounded_logits
from tests.support.checkpoints import write_checkpoint
from tests.support.gguf_files import every, write_gguf
from tests.support.packed_checkpoints import CASES, EXPERTS, SIZES, pack_checkpoint
from tests.support.quantized import quantized_copy, rounded, with_quantized_head

Checkpoint = Callable[[str], tuple[Path, Any]]
SCHEMES = ("fp8", "int8")
FLIPPED = 0.2  # of the effect of quantization, where a number on the edge of two codes takes the other


def load(directory: Path, scheme: str, head: str = "keep") -> tuple[Decoder, dict[str, torch.Tensor]]:
    memory = Kept()
    config = read_config(directory, scheme, head)
    model, loading = load_model(directory, config, max_len=512, dtype="float32", memory=memory)
    loading.wait()
    assert isinstance(model, Decoder)
    return model, memory.tensors


class Kept(OwnWeights):
    """A region of this process, with its tensors by name."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.tensors: dict[str, torch.Tensor] = {}

    def begin(self, layout: Any, fill: Any) -> Any:
        region, loading = super().begin(layout, fill)
        self.tensors = layout.tensors(region)
        return region, loading


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "variant",
    [
        "qwen3-tied", "qwen2-odd-group", "gemma3", "qwen3.5", "deepseek-v2", "qwen3-moe", "qwen3.5-moe",
        "deepseek-v2-lite", "gpt-oss", "gemma4-experts",
    ],
)  # fmt: skip
@torch.inference_mode()
def test_logits_are_those_of_quantized_products(variant: str, scheme: str, checkpoint: Checkpoint) -> None:
    directory, plain = checkpoint(variant)
    theirs = quantized_copy(plain, scheme)
    model, _ = load(directory, scheme)
    cache = Cache(model, CPU)
    ragged = prompts(1, 37, 100)
    ours = model.forward(cache.batch([(ids, 0, cache.blocks(len(ids))) for ids in ragged]), cache.ops)
    expected, unquantized = (
        torch.cat([each(torch.tensor([ids])).logits[0] for ids in ragged]) for each in (theirs, plain)
    )
    effect, _ = errors(expected, unquantized)
    assert effect > 1e-2
    assert errors(ours, expected)[0] < FLIPPED * effect
    [ids] = prompts(70)
    blocks = cache.blocks(70)
    steps = [
        model.forward(cache.batch([(ids[begin:end], begin, blocks)]), cache.ops)
        for begin, end in itertools.pairwise([0, 1, 17, *range(60, 71)])
    ]
    assert errors(torch.cat(steps), theirs(torch.tensor([ids])).logits[0])[0] < FLIPPED * effect


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("variant", "backend"),
    [
        *((variant, CPU) for variant in ("qwen3-tied", "qwen3-untied", "gemma4")),
        *(
            pytest.param(variant, Backend("cuda:0", dtype, 0.0, 0.0), marks=pytest.mark.gpu)
            for variant in ("qwen3-tied", "qwen3-untied")
            for dtype in ("float32", "bfloat16")
        ),
    ],
)
@torch.inference_mode()
def test_a_head_in_8_bits_is_a_copy_beside_the_table(
    variant: str, backend: Backend, scheme: str, checkpoint: Checkpoint
) -> None:
    directory, plain = checkpoint(variant)
    _, tensors = load(directory, "auto", scheme)
    stored = load_file(directory / "model.safetensors")
    table = stored["model.embed_tokens.weight"]
    head = rounded(stored.get("lm_head.weight", table), scheme)
    assert torch.equal(tensors["lm_head"].double() * tensors["lm_head_scales"].double(), head)
    assert torch.equal(tensors["embed"], table) and {name for name in tensors if "_scales" in name} == {
        "lm_head_scales"
    }
    model, loading = load_model(
        directory, read_config(directory, "auto", scheme), max_len=512, dtype=backend.dtype,
        memory=OwnWeights(backend.device),
    )  # fmt: skip
    loading.wait()
    assert isinstance(model, Decoder)
    share = FLIPPED if backend.dtype == "float32" else 0.6
    for ragged in (prompts(1, 37, 100), prompts(1)):
        cache, is_lone = Cache(model, backend), len(ragged) == 1 and backend.device != "cpu"
        ours = model.forward(cache.batch([(ids, 0, cache.blocks(len(ids))) for ids in ragged]), cache.ops)
        assert ours.dtype == torch.float32
        theirs = with_quantized_head(plain, scheme, plain_inputs=is_lone)
        expected, unquantized = (
            torch.cat([each(torch.tensor([ids])).logits[0] for ids in ragged]) for each in (theirs, plain)
        )
        of_rounding = rounded_logits(plain, backend, ragged)
        usual = 0.0 if of_rounding is None else errors(of_rounding, unquantized)[0]
        assert errors(ours, expected)[0] < share * errors(expected, unquantized)[0] + 3.0 * usual


@pytest.mark.parametrize("variant", ["qwen3-tied", "qwen3-untied"])
def test_a_head_in_8_bits_takes_its_bytes(variant: str, checkpoint: Checkpoint) -> None:
    directory, _ = checkpoint(variant)
    plain, narrow = (read_config(directory, "auto", head) for head in ("keep", "fp8"))
    elements, codes = 300 * 64, 300 * (64 + 4)
    assert plain.step_bytes(3, 2) - narrow.step_bytes(3, 2) == 2 * elements - codes
    added = codes if variant == "qwen3-tied" else codes - 2 * elements
    assert narrow.weight_bytes(2) - plain.weight_bytes(2) == added
    assert model_bytes(narrow, "bfloat16") - model_bytes(plain, "bfloat16") == pytest.approx(added, abs=600)
    assert narrow.activation_bytes(1, 1) == plain.activation_bytes(1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("variant", ["qwen3-tied", "gemma3", "qwen3.5", "deepseek-v2", "qwen3-moe", "gpt-oss"])
@torch.inference_mode()
def test_logits_of_a_gpu_are_those_of_quantized_products(
    variant: str, scheme: str, dtype: str, checkpoint: Checkpoint
) -> None:
    directory, plain = checkpoint(variant)
    backend = Backend("cuda:0", dtype, 0.0, 0.0)
    model, loading = load_model(
        directory, read_config(directory, scheme), max_len=512, dtype=dtype, memory=OwnWeights("cuda:0")
    )
    loading.wait()
    assert isinstance(model, Decoder)
    is_exact = dtype == "float32" and scheme == "int8"  # else more is rounded: before codes, or in sums of e4m3
    cache, share = Cache(model, backend), FLIPPED if is_exact else 0.6
    for ragged in (prompts(1, 37, 100), prompts(37), prompts(1)):
        ours = model.forward(cache.batch([(ids, 0, cache.blocks(len(ids))) for ids in ragged]), cache.ops)
        theirs = quantized_copy(plain, scheme, plain_inputs=len(ours) == 1)
        expected, unquantized = (
            torch.cat([each(torch.tensor([ids])).logits[0] for ids in ragged]) for each in (theirs, plain)
        )
        rounded = rounded_logits(plain, backend, ragged)
        usual = 0.0 if rounded is None else errors(rounded, unquantized)[0]
        assert errors(ours, expected)[0] < share * errors(expected, unquantized)[0] + 3.0 * usual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_row_is_quantized_from_the_numbers_of_the_file(
    scheme: str, dtype: torch.dtype, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.models.loading.upload.SLOT_BYTES", 700)  # a few rows, and less than one of `down`
    source, _ = checkpoint("qwen3-tied")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    stored = {name: tensor.to(dtype) for name, tensor in load_file(source / "model.safetensors").items()}
    k_proj = stored["model.layers.1.self_attn.k_proj.weight"]
    k_proj[3] = 0.0
    k_proj[4] *= 100.0  # a scale of its own
    save_file(stored, tmp_path / "model.safetensors")
    _, tensors = load(tmp_path, scheme)
    for stack, parts in {
        "qkv": [f"self_attn.{each}_proj" for each in "qkv"],
        "o": ["self_attn.o_proj"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
    }.items():
        expected = torch.cat([rounded(stored[f"model.layers.1.{part}.weight"], scheme) for part in parts])
        codes, scales = tensors[f"layers.1.{stack}"], tensors[f"layers.1.{stack}_scales"]
        assert codes.element_size() == 1
        assert torch.equal(codes.double() * scales.double(), expected)
    assert torch.equal(tensors["embed"], stored["model.embed_tokens.weight"].float())


def assert_quantized_anew(path: Path, scheme: str) -> None:
    """That a quantized or GGUF model's rows are quantized from what they are when they are plain."""
    (_, plain), (_, made) = load(path, "auto"), load(path, scheme)
    for name, tensor in plain.items():
        if f"{name}_scales" in made:
            stands_for = made[name].double() * made[f"{name}_scales"].double()
            assert torch.equal(stands_for, rounded(tensor, scheme))
        else:
            assert torch.equal(made[name], tensor)
    assert len(made) > len(plain)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "case", ["fp8-blocks", *(pytest.param(case, marks=pytest.mark.medium) for case in ("awq", "gptq-act-order"))]
)
def test_rows_of_quantized_checkpoints_are_quantized_anew(
    case: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.models.loading.upload.SLOT_BYTES", 30_000)
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    for each in (packed, plain):
        each.mkdir()
    write_checkpoint("qwen3-untied", packed, sizes=SIZES)
    pack_checkpoint(packed, plain, CASES[case]())
    assert_quantized_anew(packed, scheme)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param("mistral4", id="stacked"),
        pytest.param("deepseek-v2-lite", id="shared-of-several", marks=pytest.mark.medium),
    ],
)
def test_experts_of_quantized_checkpoints_are_quantized_anew(variant: str, tmp_path: Path) -> None:
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    for each in (packed, plain):
        each.mkdir()
    write_checkpoint(variant, packed)
    pack_checkpoint(packed, plain, EXPERTS["fp8-blocks"]())
    assert_quantized_anew(packed, "int8")


@pytest.mark.parametrize("kind", [Type.F16, Type.Q8_0, Type.Q4_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("variant", ["llama", "qwen3-tied"])
def test_rows_of_gguf_files_are_quantized_in_their_order(
    variant: str, kind: Type, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.models.loading.upload.SLOT_BYTES", 700)
    directory, _ = checkpoint(variant)
    assert_quantized_anew(write_gguf(tmp_path / "model.gguf", directory, every(kind)), "fp8")


def test_experts_of_gguf_files_are_quantized(tmp_path: Path) -> None:
    write_checkpoint("qwen3-moe", tmp_path, sizes={"mlp_only_layers": []})
    assert_quantized_anew(write_gguf(tmp_path / "model.gguf", tmp_path, every(Type.Q8_0)), "int8")


@pytest.mark.parametrize(("variant", "num_stacks"), [("qwen3-tied", 12), ("qwen3-moe", 12)])
def test_a_quantized_model_takes_its_bytes(variant: str, num_stacks: int, checkpoint: Checkpoint) -> None:
    directory, _ = checkpoint(variant)
    plain, quantized = (read_config(directory, choice) for choice in ("auto", "int8"))
    rows = {name: stack.shape for name, stack in quantized.stacks().items() if is_quantized(stack)}
    saved = sum(math.prod(shape) - 4 * shape[0] for shape in rows.values())
    assert len(rows) == num_stacks
    assert plain.step_bytes(3, 2) == 2 * plain.step_weights(3)
    assert quantized.step_bytes(10**6, 2) == 2 * plain.step_weights(10**6) - saved
    assert plain.weight_bytes(2) - quantized.weight_bytes(2) == saved
    padding = 2 * 256 * len(quantized.stacks())
    assert abs(model_bytes(plain, "bfloat16") - model_bytes(quantized, "bfloat16") - saved) < padding


def test_what_a_family_keeps_packed_is_not_quantized_again(checkpoint: Checkpoint) -> None:
    directory, _ = checkpoint("gpt-oss-mxfp4")
    with pytest.raises(ModelError, match=r"model\.quantization = 'fp8' is for matrices in 16 bits.*set auto"):
        read_config(directory, "fp8")


def test_each_scheme_is_a_model_of_its_own(checkpoint: Checkpoint) -> None:
    directory, _ = checkpoint("qwen3-tied")
    model = model_fingerprint(directory)
    found = {chosen_fingerprint(model, choice, "keep") for choice in QUANTIZATIONS}
    assert len(found) == len(QUANTIZATIONS) and model in found
    found |= {chosen_fingerprint(model, choice, head) for choice in QUANTIZATIONS for head in HEADS}
    assert len(found) == len(QUANTIZATIONS) * len(HEADS)
