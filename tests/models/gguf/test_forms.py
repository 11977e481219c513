"""Blocks of a file that stay packed: the elements they stand for, the logits, and near misses."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from torch import Tensor

from common.models.forms import Target, forms_on
from common.models.gguf import unpacking
from common.models.gguf.forms import FORMS
from common.models.held import read_model
from common.models.loader import model_bytes
from common.models.quantization import groups
from common.models.sizes.codes import PAIRS, Codes
from common.ops.base import packing
from common.ops.reference import dequantized
from deploy.serve.model_source import weights_bytes
from tests.models.gguf.test_unpacking import legal_blocks
from tests.models.quantization.test_integers import elements
from tests.models.quantization.test_kept import load
from tests.models.test_decoder import CPU, Cache, errors, prompts
from tests.support.checkpoints import VARIANTS, write_checkpoint
from tests.support.forms import on_cpu
from tests.support.gguf_files import every, tensors_of, write_gguf

HALF = "float16"
WIDE = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
ROUNDED = ("Q4_K", "Q5_K", "Q6_K")
"""Types whose scales float16 rounds."""
M = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K"}
"""Types in files of Q4_K_M, by the tensor's name; others are Q4_K."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of Llama, whose file has rows of Q and K in another order."""
    path = tmp_path_factory.mktemp("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VARIANTS, "wide-llama", ("llama", WIDE))
        write_checkpoint("wide-llama", path)
    return path


def write_blocks(path: Path, directory: Path, type_of: Callable[[str], str]) -> Path:
    """Write matrices of random blocks."""
    found = {}
    for number, (name, tensor) in enumerate(tensors_of(directory).items()):
        if "norm" not in name:
            kind = type_of(name)
            blocks = legal_blocks(kind, 500 + number)
            count = tensor.numel() // GGML_QUANT_SIZES[Type[kind]][0]
            found[name] = np.resize(blocks, (count, blocks.shape[1])).reshape(*tensor.shape[:-1], -1), kind

    def add(writer: GGUFWriter) -> None:
        for name, (data, kind) in found.items():
            writer.add_tensor(name, data, raw_dtype=Type[kind])

    return write_gguf(path, directory, changes=dict.fromkeys(found), metadata=add)


def both(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the matrices of a model stand for, packed and plain, the head among them."""
    found = []
    for choice in ("packed", "plain"):
        model, _ = load(path, choice)
        found.append(elements(model) | {"head": dequantized(model.lm_head)})
    return found[0], found[1]


def is_near(ours: Tensor, plain: Tensor) -> bool:
    """Whether elements are as near as float16 has scales, beside the largest of their row's 16 neighbours."""
    largest = plain.unflatten(1, (-1, 16)).abs().amax(-1, keepdim=True)
    return bool(((ours - plain).unflatten(1, (-1, 16)).abs() <= 4e-3 * largest).all())


@pytest.mark.parametrize("kind", FORMS)
def test_elements_are_those_of_the_file(kind: str, directory: Path, tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "m.gguf", directory, lambda name: kind)
    held = dict(read_model(path, on_cpu("packed")).kept)
    assert set(held.values()) == {FORMS[kind]} and len(held) == 2 * 4 + 1
    ours, plain = both(path)
    same = is_near if kind in ROUNDED else torch.equal
    assert [name for name, tensor in plain.items() if not same(ours[name], tensor)] == []


def test_a_stack_of_several_types_is_held_in_the_widest_form(directory: Path, tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "m.gguf", directory, lambda name: M.get(name.split(".")[-2], "Q4_K"))
    config = read_model(path, on_cpu("packed"))
    held = dict(config.kept)
    assert held["layers.1.qkv"] == Codes("int8", 1, 16, HALF, HALF)
    assert held["layers.1.down"] == held["lm_head"] == Codes("int8", 1, 16, HALF)
    assert held["layers.1.o"] == held["layers.1.gate_up"] == Codes(PAIRS, 1, 32, HALF, HALF)
    ours, plain = both(path)
    assert [name for name, tensor in plain.items() if not is_near(ours[name], tensor)] == []
    assert weights_bytes(path, on_cpu("packed")) == pytest.approx(model_bytes(config, "bfloat16"), rel=0.01)


@pytest.mark.parametrize("kind", [*FORMS, "Q4_K_M"])
def test_a_file_is_held_in_4_bits_on_hopper_and_plain_elsewhere(kind: str, directory: Path, tmp_path: Path) -> None:
    """Groups of files are small, and 16 bits beside many sequences faster on other GPUs."""
    types = M if kind == "Q4_K_M" else {}
    path = write_blocks(tmp_path / "m.gguf", directory, lambda name: types.get(name.split(".")[-2], kind[:4]))
    packed = dict(read_model(path, on_cpu("packed")).kept)
    assert packed
    on_hopper = dict(read_model(path, forms_on(Target((9, 0)), "auto")).kept)
    assert on_hopper == {name: form for name, form in packed.items() if form.dtype == PAIRS}
    assert bool(on_hopper) == kind.startswith("Q4")
    assert not dict(read_model(path, forms_on(Target((8, 9)), "auto")).kept)
    assert read_model(path, on_cpu("auto")).codes == read_model(path, on_cpu("plain")).codes == ""


def swapped(blocks: Tensor) -> tuple[Tensor, Tensor]:
    scales, mins = whole(blocks)
    return mins, scales


pack, whole, spread = packing.pack, unpacking._scales_and_mins, groups._spread
MISSES: dict[str, tuple[object, str, object]] = {
    "nibbles swapped": (groups, "pack", lambda codes: (packed := pack(codes)) << 4 | packed >> 4),
    "scales and minimums swapped": (unpacking, "_scales_and_mins", swapped),
    "scales of the next group": (groups, "_spread", lambda numbers, target: spread(numbers.roll(1, 1), target)),
}


@pytest.mark.parametrize("miss", MISSES)
def test_a_near_miss_stands_for_other_elements(
    miss: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_blocks(tmp_path / "m.gguf", directory, lambda name: "Q4_K")
    _, plain = both(path)
    place, name, function = MISSES[miss]
    monkeypatch.setattr(place, name, function)
    ours, _ = both(path)
    assert not any(is_near(ours[name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize(("kind", "limit"), [(Type.Q4_1, 1e-5), (Type.Q8_0, 1e-5)], ids=str)
@torch.inference_mode()
def test_logits_are_those_of_plain_blocks(kind: Type, limit: float, directory: Path, tmp_path: Path) -> None:
    path, found = write_gguf(tmp_path / "m.gguf", directory, every(kind)), []
    for choice in ("packed", "plain"):
        model, _ = load(path, choice)
        cache = Cache(model, CPU)
        batch = cache.batch([(ids, 0, cache.blocks(len(ids))) for ids in prompts(1, 37)])
        found.append(model.forward(batch, cache.ops))
    assert errors(*found)[0] < limit


def test_a_table_that_is_also_the_head_is_held_twice(tmp_path: Path) -> None:
    write_checkpoint("qwen3-tied", tmp_path)
    path = write_gguf(tmp_path / "m.gguf", tmp_path, every(Type.Q8_0))
    model, tensors = load(path, "packed")
    assert tensors["embed"].dtype == torch.float32 and tensors["lm_head"].dtype == torch.int8
    assert torch.equal(dequantized(model.lm_head), tensors["embed"])
    assert weights_bytes(path, on_cpu("packed")) == pytest.approx(model_bytes(model.config, "bfloat16"), rel=0.02)
    plain = read_model(path, on_cpu("plain"))
    saved = plain.step_bytes(1, 2) - model.config.step_bytes(1, 2)
    assert saved == sum(
        2 * each.numel() - each.numel() - 2 * tensors[f"{name}_scales"].numel()
        for name, each in tensors.items()
        if each.dtype == torch.int8
    )
