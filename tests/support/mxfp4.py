"""Weights rounded to MXFP4, as a checkpoint in this format holds them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.base.mxfp4 import GROUP
from common.ops.reference.mxfp4 import MAGNITUDES, from_mxfp4


def to_mxfp4(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest values of `[..., width]` as bytes `[..., width / 2]`, and scales `[..., width / 32]`."""
    groups = matrix.float().unflatten(-1, (-1, GROUP))
    exponents = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30).log2().floor() - 2.0
    scaled = groups / exponents.exp2()
    codes = (scaled.abs()[..., None] - torch.tensor(MAGNITUDES)).abs().argmin(-1) + 8 * (scaled < 0)
    codes = codes.flatten(-2)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponents.squeeze(-1) + 127).to(torch.uint8)


def round_experts(model: Any) -> None:
    """Round the experts of a transformers model, whose inputs are the rows of a matrix, to values of MXFP4."""
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parameter.copy_(from_mxfp4(*to_mxfp4(parameter.mT)).mT)


def pack_experts(directory: Path) -> None:
    """Rewrite a saved checkpoint of rounded experts in the form published."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = to_mxfp4(tensors.pop(name).mT)
        tensors[f"{name}_blocks"] = blocks.unflatten(-1, (-1, GROUP // 2)).contiguous()
        tensors[f"{name}_scales"] = scales
    save_file(tensors, path)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (directory / "config.json").write_text(json.dumps(config))
