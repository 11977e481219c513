"""Tiny checkpoints in each format of quantized weights, and the same checkpoint made plain."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support import packers
from tests.support.packers import Packed, Packer

PROJECTIONS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "gate_proj", "up_proj", "down_proj", "in_proj_qkv", "in_proj_qkvz", "in_proj_z", "out_proj",
)  # fmt: skip
STACKED = ("experts.gate_up_proj", "experts.down_proj")
"""Matrices of all experts in a tensor."""
UNEVEN = ["in_proj_a", "in_proj_b", "in_proj_ba"]
"""Projections with too few rows, which published checkpoints leave as they are."""
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 2, "head_dim": 64}
"""Sizes with rows and columns that blocks of 128 do not fill."""
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INT8_ROWS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        }
    },
}
"""What compressed-tensors says of W8A8, in short."""
STATIC = {"activation_scheme": "static", "weight_block_size": None, "modules_to_not_convert": ["lm_head"]}
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
E8M0 = torch.float8_e8m0fnu


class Case(NamedTuple):
    """A format: the configuration, and the packer of each matrix."""

    config: dict[str, Any]
    pack: Packer
    left: str = "a^"  # expression of names of modules that are left as they are


def compressed(preset: str, **weights: object) -> Case:
    """A preset of compressed-tensors, packed and made plain by the package itself."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    scheme = preset_name_to_scheme(preset, ["Linear"])
    scheme.weights = scheme.weights.model_copy(update=weights)
    format_ = infer_module_format(torch.nn.Linear, scheme)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=format_.value)
    compressor = BaseCompressor.get_value_from_registry(format_.value)

    def pack(matrix: Tensor) -> Packed:
        state = {"weight": matrix.bfloat16(), **_qparams(matrix, scheme.weights)}
        tensors = compressor.compress(state, scheme)
        plain = compressor.decompress(tensors, scheme)["weight"].float()
        if scheme.input_activations and not scheme.input_activations.dynamic:
            tensors["input_scale"] = torch.tensor([0.25])
        return {name: tensor.contiguous() for name, tensor in tensors.items()}, plain

    return Case(json.loads(config.model_dump_json()), pack)


def _qparams(matrix: Tensor, args: Any) -> dict[str, Tensor]:
    """Scales and zeros by the least and greatest element of each part of a matrix."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    rows, columns = matrix.shape
    size = args.group_size or columns
    parts = {
        "tensor": matrix.reshape(1, 1, -1),
        "channel": matrix.view(rows, 1, -1),
        "group": matrix.view(rows, -1, size),
        "tensor_group": matrix.view(rows, -1, size),
    }
    if args.strategy == "block":
        padded = torch.nn.functional.pad(matrix, (0, -columns % 128, 0, -rows % 128))
        blocks = padded.view(-(-rows // 128), 128, -(-columns // 128), 128)
        parts["block"] = blocks.transpose(1, 2).flatten(2)
    part = parts[args.strategy].bfloat16()
    if args.strategy == "tensor":
        part = part[0]
    low, high = part.amin(-1), part.amax(-1)
    of_all = generate_gparam(low.min(), high.max()) if args.strategy == "tensor_group" else None
    scales, zeros = calculate_qparams(low, high, args, global_scale=of_all)
    found = {"weight_scale": scales, "weight_zero_point": zeros}
    return found | ({"weight_global_scale": of_all} if of_all is not None else {})


CASES: dict[str, Callable[[], Case]] = {
    "fp8-blocks": lambda: Case(FP8, packers.fp8_blocks()),
    "fp8-blocks-bf16-scales": lambda: Case(FP8, packers.fp8_blocks(torch.bfloat16)),
    "fp8-blocks-ue8m0-scales": lambda: Case(FP8 | {"scale_fmt": "ue8m0"}, packers.fp8_blocks(E8M0)),
    "fp8-static": lambda: Case(FP8 | STATIC, packers.fp8_whole("weight_scale_inv", input_scale="activation_scale")),
    "fp8-modelopt": lambda: Case(MODELOPT, packers.fp8_whole("weight_scale")),
    "fp8-modelopt-rows": lambda: Case(MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, packers.fp8_rows()),
    "fp8-compressed": lambda: compressed("FP8"),
    "fp8-compressed-rows": lambda: compressed("FP8_DYNAMIC"),
    "fp8-compressed-blocks": lambda: compressed("FP8_BLOCK"),
    "mxfp8-compressed": lambda: compressed("MXFP8"),
    "int8-compressed": lambda: compressed("W8A8"),
    "int8-rows": lambda: Case(INT8_ROWS, packers.int8_rows),
    "int8-compressed-asymmetric": lambda: compressed("W8A8", symmetric=False),
    "int8-compressed-packed": lambda: compressed("W8A16", group_size=64),
    "int8-compressed-packed-rows": lambda: compressed("W8A16", group_size=None, strategy="channel"),
    "int4-compressed": lambda: compressed("W4A16", group_size=32),
    "int4-compressed-asymmetric": lambda: compressed("W4A16_ASYM", group_size=64),
    "awq": lambda: Case(AWQ, packers.awq(64)),
    "gptq": lambda: Case(GPTQ, packers.gptq(4, 32)),
    "gptq-v2": lambda: Case(GPTQ | {"checkpoint_format": "gptq_v2"}, packers.gptq(4, 32, version=2)),
    "gptq-act-order": lambda: Case(GPTQ | {"desc_act": True}, packers.gptq(4, 32, scattered=True)),
    "gptq-int8": lambda: Case(GPTQ | {"bits": 8, "group_size": -1}, packers.gptq(8, 0)),
    "marlin": lambda: Case(GPTQ | {"group_size": 64, "is_marlin_format": True}, packers.marlin(64)),
    "marlin-rows": lambda: Case(GPTQ | {"group_size": -1, "checkpoint_format": "marlin"}, packers.marlin(0)),
    "nvfp4-modelopt": lambda: Case(MODELOPT | {"quant_algo": "NVFP4", "group_size": 16}, packers.nvfp4),
    "nvfp4-compressed": lambda: compressed("NVFP4A16"),
    "mxfp4-compressed": lambda: compressed("MXFP4A16"),
}
"""Makers of cases, because the packages that write some of them take seconds to import."""


def awq_128() -> Case:
    """Return the case of groups of 128 columns, as published checkpoints have them; widths must be multiples."""
    return Case(AWQ | {"group_size": 128}, packers.awq(128))


def kimi() -> Case:
    """INT4 of experts alone, as Kimi K2 Thinking has it."""
    case = compressed("W4A16", group_size=32)
    ignored = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    left = r".*(self_attn|shared_experts|mlp\.(gate|up|down)_proj)"
    return Case(case.config | {"ignore": ignored}, case.pack, left)


EXPERTS: dict[str, Callable[[], Case]] = {
    "fp8-blocks": lambda: Case(
        FP8 | {"weight_block_size": [32, 32], "modules_to_not_convert": UNEVEN}, packers.fp8_blocks(size=32)
    ),
    "gptq": lambda: Case(GPTQ | {"group_size": 16}, packers.gptq(4, 16)),
    "awq": lambda: Case(AWQ | {"group_size": 16}, packers.awq(16)),
    "nvfp4-modelopt": lambda: Case(
        MODELOPT | {"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*.in_proj_[ab]", "*.in_proj_ba"]},
        packers.nvfp4,
    ),
}
"""Makers of cases for models whose matrices have widths of 32, 48, 64 and 96."""


def pack_checkpoint(directory: Path, plain_directory: Path, case: Case, *, evenly: bool = False) -> None:
    """Rewrite a saved checkpoint in a format; write what it means, in fp32, to another directory.

    Args:
        evenly: matrices keep their values, and are not changed so that a scale in a wrong place shows.
    """
    path = directory / "model.safetensors"
    tensors = load_file(path)
    plain = {name: tensor.float() for name, tensor in tensors.items()}
    for name in [name for name in tensors if name.endswith(STACKED) and tensors[name].dim() == 3]:
        matrices = tensors.pop(name).float().unbind()
        packed = [case.pack(_uneven(matrix * 2.0 ** (number % 3 - 1))) for number, matrix in enumerate(matrices)]
        plain[name] = torch.stack([of_matrix for _, of_matrix in packed])
        for field in packed[0][0]:
            key = f"{name}{field.removeprefix('weight')}" if field.startswith("weight") else f"{name}_{field}"
            tensors[key] = torch.stack([each[field] for each, _ in packed])
    ends = tuple(f".{each}.weight" for each in PROJECTIONS)
    for name in [name for name in tensors if name.endswith(ends) and not re.match(case.left, name)]:
        matrix = tensors.pop(name).float()
        of_matrix, plain[name] = case.pack(matrix if evenly else _uneven(matrix))
        tensors |= {f"{name.removesuffix('weight')}{field}": tensor for field, tensor in of_matrix.items()}
    save_file(tensors, path)
    save_file(plain, plain_directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (plain_directory / "config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": case.config}))


def _uneven(matrix: Tensor) -> Tensor:
    """Return a matrix whose parts have scales far from each other, so that a scale in a wrong place shows."""
    rows, columns = matrix.shape
    by_row = torch.linspace(-1.0, 1.0, rows).exp2()[:, None]
    by_column = torch.linspace(1.5, -1.5, columns).exp2()
    return (matrix * by_row * by_column).bfloat16().float()
