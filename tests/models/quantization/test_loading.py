"""A quantized checkpoint whose files and configuration do not belong together is refused with what is wrong."""

import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.base.errors import ModelError
from common.models.loading import checkpoint, weights
from common.models.loading.upload import SLOT_BYTES
from common.models.quantization import packed_part, stored
from common.models.quantization.rules import formats_of
from common.models.reading import read_config
from common.wire.values.fingerprint import model_fingerprint
from tests.models.quantization.conftest import Written
from tests.models.quantization.test_formats import load
from tests.support.packed_checkpoints import FP8, GPTQ, MODELOPT

Q = "model.layers.0.self_attn.q_proj"


def change(directory: Path, **changes: Callable[[Tensor], Tensor] | None) -> None:
    """Change tensors of the first layer's query matrix, each by a function; None takes it away."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, make in changes.items():
        tensor = tensors.pop(f"{Q}.{name}")
        if make is not None:
            tensors[f"{Q}.{name}"] = make(tensor).contiguous()
    save_file(tensors, path)


def add(directory: Path, **tensors: Tensor) -> None:
    path = directory / "model.safetensors"
    save_file(load_file(path) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}, path)


def configure(directory: Path, table: dict[str, Any] | None) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": table}))


@pytest.mark.parametrize(
    ("case", "name", "make", "message"),
    [
        ("fp8-blocks", "weight_scale_inv", None, r"weight_scale_inv is missing, which FP8 with a scale for 128 rows"),
        (
            "fp8-blocks",
            "weight_scale_inv",
            lambda scales: scales[:1],
            r"weight_scale_inv is \[1, 2\], its format and config\.json say \[2, 2\]",
        ),
        (
            "fp8-blocks",
            "weight_scale_inv",
            Tensor.char,
            r"weight_scale_inv is I8, supported are BF16, F16, F32, F8_E8M0",
        ),
        (
            "fp8-blocks",
            "weight_scale_inv",
            lambda scales: scales * torch.inf,
            r"weight_scale_inv has numbers that are n",
        ),
        ("fp8-blocks", "weight", Tensor.float, r"1 unexpected tensors: .*q_proj\.weight_scale_inv"),
        (
            "fp8-compressed-rows",
            "weight",
            Tensor.float,
            r"q_proj has weight in F32, and config\.json: quantization_conf",
        ),
        (
            "fp8-blocks",
            "weight",
            lambda codes: codes.view(torch.int8),
            r"q_proj has weight in I8, and .* says FP8 with",
        ),
        ("fp8-blocks", "weight", lambda codes: codes[:128], r"q_proj\.weight is \[128, 256\], .* say \[256, 256\]"),
        (
            "fp8-blocks-ue8m0-scales",
            "weight_scale_inv",
            lambda scales: torch.full_like(scales.view(torch.uint8), 255).view(scales.dtype),
            r"weight_scale_inv has numbers that are not finite",
        ),
        ("awq", "qzeros", None, r"q_proj\.qzeros is missing, which INT4 of AWQ, groups of 64 needs"),
        ("awq", "qweight", torch.t, r"q_proj\.qweight is \[32, 256\], .* say \[256, 32\]"),
        ("gptq", "g_idx", lambda groups: groups + 1, r"g_idx has groups of 1 to 8, 0 to 7 is needed"),
        ("gptq", "scales", lambda scales: scales[:4], r"q_proj\.scales is \[4, 256\], .* say \[8, 256\]"),
        (
            "int4-compressed",
            "weight_shape",
            lambda shape: shape + 1,
            r"weight_shape is \[257, 257\], config\.json says",
        ),
        ("int4-compressed-asymmetric", "weight_zero_point", None, r"q_proj\.weight_zero_point is missing"),
        ("nvfp4-modelopt", "weight_scale_2", None, r"q_proj\.weight_scale_2 is missing, which NVFP4 needs"),
        ("nvfp4-compressed", "weight_global_scale", torch.zeros_like, r"weight_global_scale is 0, and divides"),
    ],
)
def test_a_wrong_tensor_is_named(
    case: str, name: str, make: Callable[[Tensor], Tensor] | None, message: str, packed: Callable[[str], Path]
) -> None:
    directory = packed(case)
    change(directory, **{name: make})
    with pytest.raises(ModelError, match=message):
        load(directory)


@pytest.mark.parametrize("case", ["fp8-blocks", "fp8-compressed-rows", "fp8-modelopt"])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_not_a_number_is_refused_with_its_row(
    case: str, code: int, packed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest number, one bit below, is loaded; pieces of 128 rows, so that the code is in the second."""
    monkeypatch.setattr(packed_part, "MAX_ELEMENTS", 128 * 256)
    directory = packed(case)

    def with_code(codes: Tensor, wanted: int) -> Tensor:
        codes.view(torch.uint8)[200, 255] = wanted
        return codes

    change(directory, weight=lambda codes: with_code(codes, code - 1))
    load(directory)
    change(directory, weight=lambda codes: with_code(codes, code))
    with pytest.raises(ModelError, match=r"q_proj.*: weight has a code that is not a number in row 200, in model\.saf"):
        load(directory)


@pytest.mark.parametrize(
    ("case", "table", "message"),
    [
        ("fp8-blocks", None, r"q_proj\.weight is F8_E4M3, supported are|unexpected tensors: .*weight_scale_inv"),
        (
            "fp8-blocks",
            FP8 | {"modules_to_not_convert": [Q]},
            r"q_proj has weight in F8_E4M3, and .* says no quantizat",
        ),
        ("fp8-blocks", FP8 | {"weight_block_size": [64, 64]}, r"is \[2, 2\], its format and config\.json say \[4, 4\]"),
        ("fp8-blocks", FP8 | {"weight_block_size": None}, r"is \[2, 2\], its format and config\.json say \[1, 1\]"),
        ("fp8-blocks", GPTQ, r"q_proj has weight in F8_E4M3, and .* says INT4 of GPTQ, groups of 32"),
        ("awq", GPTQ, r"q_proj\.qweight is \[256, 32\], its format and config\.json say \[32, 256\]"),
        (
            "gptq",
            GPTQ | {"group_size": 64},
            r"q_proj\.scales is \[8, 256\], its format and config\.json say \[4, 256\]",
        ),
        ("gptq", GPTQ | {"group_size": 48}, r"rows of 256 elements, a multiple of the group of 48 is needed"),
        ("gptq", GPTQ | {"bits": 8}, r"q_proj\.qweight is \[32, 256\], its format and config\.json say \[64, 256\]"),
        ("nvfp4-modelopt", MODELOPT, r"q_proj has weight in U8, and .* says FP8 with a scale for all rows"),
    ],
)
def test_a_configuration_that_contradicts_the_file_is_refused(
    case: str, table: dict[str, Any] | None, message: str, packed: Callable[[str], Path]
) -> None:
    directory = packed(case)
    configure(directory, table)
    with pytest.raises(ModelError, match=message):
        load(directory)


def test_a_plain_checkpoint_that_says_it_is_quantized_is_refused(written: Callable[[str], Written]) -> None:
    _, plain = written("gptq")
    configure(plain, GPTQ)
    try:
        with pytest.raises(ModelError, match=r"no tensor is quantized, and .*quantization_config says gptq"):
            load(plain)
    finally:
        configure(plain, None)


def test_tensors_of_a_matrix_may_lie_in_several_files(packed: Callable[[str], Path]) -> None:
    directory = packed("fp8-blocks")
    expected, tensors = load(directory), load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + name.endswith('scale_inv')}-of-00002.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, directory / file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load(directory).items())
    index.write_text(json.dumps({"weight_map": files | {f"{Q}.weight_scale_inv": files[f"{Q}.weight"]}}))
    with pytest.raises(
        ModelError, match=r"q_proj\.weight_scale_inv is not in model-00001-of-00002\.safetensors, where"
    ):
        load(directory)


def test_a_file_that_ends_early_is_named(packed: Callable[[str], Path]) -> None:
    directory = packed("gptq")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a safetensors file.*fetch the model again"):
        load(directory)


def test_what_stands_beside_is_not_needed_and_unknown_scales_are_errors(packed: Callable[[str], Path]) -> None:
    directory, scale = packed("fp8-modelopt"), torch.tensor(0.5)
    expected = load(directory)
    known = ("self_attn.k_scale", "self_attn.v_proj.v_scale", "self_attn.k_proj.output_scale", "self_attn.kv_scale")
    add(directory, **{f"model.layers.0.{name}": scale.clone() for name in known})
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load(directory).items())
    add(directory, model__layers__0__self_attn__rotation_scale=scale)
    with pytest.raises(ModelError, match=r"1 unexpected tensors: model\.layers\.0\.self_attn\.rotation_scale"):
        load(directory)


@pytest.mark.parametrize("case", ["gptq", "gptq-int8"])
def test_a_table_of_groups_that_names_none_is_none(case: str, packed: Callable[[str], Path]) -> None:
    directory = packed(case)
    expected = load(directory)
    change(directory, g_idx=lambda groups: torch.full_like(groups, -1))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load(directory).items())


def test_biases_of_zeros_are_dropped_and_others_are_errors(packed: Callable[[str], Path]) -> None:
    directory = packed("gptq")
    expected = load(directory)
    add(directory, **{f"{Q}.bias": torch.zeros(256)})
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load(directory).items())
    add(directory, **{f"{Q}.bias": torch.ones(256)})
    with pytest.raises(ModelError, match=r"1 unexpected tensors: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(directory)


def test_each_file_is_opened_a_few_times_however_many_biases_it_has(
    packed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of experts has tens of thousands of biases, and reading a header of as many names takes long."""
    directory, num_opened = packed("gptq"), itertools.count()
    tensors = load_file(directory / "model.safetensors")
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    add(directory, **{f"{name}.bias": torch.zeros(tensors[f"{name}.qweight"].shape[1]) for name in modules})
    monkeypatch.setattr(weights, "opened", lambda path: (next(num_opened), checkpoint.opened(path))[1])
    load(directory)
    assert len(modules) == 14 and next(num_opened) == 1


def test_zeros_of_symmetric_matrices_are_dropped_and_others_are_errors(packed: Callable[[str], Path]) -> None:
    directory = packed("int8-compressed")
    expected = load(directory)
    add(directory, **{f"{Q}.weight_zero_point": torch.zeros(256, 1, dtype=torch.int8)})
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load(directory).items())
    add(directory, **{f"{Q}.weight_zero_point": torch.ones(256, 1, dtype=torch.int8)})
    with pytest.raises(ModelError, match=r"1 unexpected tensors: .*q_proj\.weight_zero_point"):
        load(directory)


def test_a_matrix_of_8_bits_may_be_plain_without_being_listed(packed: Callable[[str], Path]) -> None:
    directory = packed("fp8-blocks")
    expected = load(directory)["layers.0.qkv"][:256]
    change(directory, weight_scale_inv=None, weight=lambda _: expected)
    assert torch.equal(load(directory)["layers.0.qkv"][:256], expected)


@pytest.mark.parametrize(
    ("case", "name", "make"),
    [
        ("fp8-blocks", "weight_scale_inv", torch.t),
        ("fp8-blocks", "weight_scale_inv", lambda scales: scales.flip(0)),
        ("fp8-blocks", "weight_scale_inv", lambda scales: 1.0 / scales),
        ("int8-compressed", "weight_scale", lambda scales: scales.flip(0)),
        ("int8-compressed-asymmetric", "weight_zero_point", lambda zeros: zeros + 1),
        ("int4-compressed", "weight_packed", lambda words: words.view(torch.uint8).flip(1).view(torch.int32)),
        ("int4-compressed-asymmetric", "weight_zero_point", lambda zeros: zeros + 0x11111111),
        ("awq", "qzeros", lambda zeros: zeros + 0x11111111),
        ("awq", "scales", lambda scales: scales.flip(0)),
        ("gptq", "qzeros", lambda zeros: zeros - 0x11111111),
        ("gptq-act-order", "g_idx", lambda groups: groups.sort().values),
        ("marlin", "s", lambda scales: scales.flip(1)),
        ("nvfp4-modelopt", "weight", lambda codes: codes << 4 | codes >> 4),
        ("nvfp4-modelopt", "weight_scale_2", lambda scale: 1.0 / scale),
        ("nvfp4-compressed", "weight_global_scale", lambda scale: 1.0 / scale),
        ("mxfp4-compressed", "weight_scale", lambda exponents: exponents + 1),
    ],
)
def test_every_tensor_matters(
    case: str, name: str, make: Callable[[Tensor], Tensor], packed: Callable[[str], Path]
) -> None:
    directory = packed(case)
    before = load(directory)["layers.0.qkv"][:256]
    change(directory, **{name: make})
    after = load(directory)["layers.0.qkv"][:256]
    assert (after != before).float().mean() > 0.4


@pytest.mark.parametrize("case", ["fp8-blocks", "awq", "gptq", "nvfp4-modelopt"])
def test_memory_beside_the_weights_is_bounded_however_large_a_matrix_is(
    case: str, written: Callable[[str], Written]
) -> None:
    config, (num_rows, width) = read_config(written(case)[0]), (151_936, 8192)
    assert config.quantization is not None
    [format_] = formats_of(config.quantization, [[Q]])
    assert format_ is not None
    held = tuple(
        (field, stored.StoredTensor(Path("a"), "a", field.dtypes[0], field.shape, 0))
        for field in format_.fields(num_rows, width)
    )
    matrix = stored.PackedMatrix("a", format_, num_rows, width, held)
    target = packed_part.Target(0, num_rows, torch.empty(num_rows, width, device="meta"))
    parts = list(packed_part.PackedPart(matrix, 0, num_rows, (target,)).split(SLOT_BYTES))
    assert max(part.num_bytes for part in parts) <= SLOT_BYTES
    assert max((part.end - part.begin) * width for part in parts) <= packed_part.MAX_ELEMENTS
    assert sum(part.target_bytes for part in parts) == num_rows * width * 4


def test_a_line_tells_what_is_made_plain(packed: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    directory = packed("fp8-modelopt")
    add(directory, model__layers__0__self_attn__k_scale=torch.tensor(0.5))
    with caplog.at_level(logging.INFO, logger="common.models.loading.weights"):
        load(directory)
    [line] = caplog.messages
    assert "14 matrices in FP8 with a scale for all rows x all columns, 0.00 GB, are made plain" in line
    assert "activations stay in 16 bits or more" in line and "scales of keys and values are for kv.dtype = fp8" in line


def test_checkpoints_of_other_quantization_are_other_models(packed: Callable[[str], Path]) -> None:
    """Workers share pools, prefixes and weights under equal fingerprints only."""
    directory = packed("gptq")
    found = {model_fingerprint(directory)}
    configure(directory, GPTQ | {"checkpoint_format": "gptq_v2"})
    found.add(model_fingerprint(directory))
    configure(directory, None)
    found.add(model_fingerprint(directory))
    for table in (GPTQ, GPTQ | {"checkpoint_format": "gptq_v2"}):
        (directory / "quantize_config.json").write_text(json.dumps(table))
        found.add(model_fingerprint(directory))
    change(directory, scales=lambda scales: scales * 2)
    found.add(model_fingerprint(directory))
    assert len(found) == 6
