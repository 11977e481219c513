"""Scales that kernels compute wrongly end the start of a GPU's worker by name; a CPU serves them."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.base.errors import ModelError
from common.device.engine.mxfp4_limits import check_scales
from common.models.base import Model
from common.settings.config import Config, KernelsSection, ModelSection, WorkerSection
from common.settings.memory_sections import KVSection
from tests.support.engines import lone_engine

NAME = "model.layers.1.mlp.experts.down_proj_scales"


class Weights:
    """A model of one matrix: two groups of 32 values a row."""

    def __init__(self, value: int, scale: int) -> None:
        self.values = torch.full((3, 32), 0x21, dtype=torch.uint8)
        self.scales = torch.full((3, 2), 120, dtype=torch.uint8)
        self.values[1, 16:] = 0x80  # zeros, with both signs
        self.values[1, 20], self.scales[1, 1] = value, scale

    def mxfp4_weights(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        return [(NAME, self.values, self.scales)]


@pytest.mark.parametrize("scale", [18, 100, 144])
@pytest.mark.parametrize("value", [0x00, 0x80, 0x10, 0x07])
def test_scales_that_kernels_compute(value: int, scale: int) -> None:
    check_scales(cast(Model, Weights(value, scale)))


@pytest.mark.parametrize(("value", "scale"), [(0x01, 17), (0x10, 17), (0x70, 0), (0x01, 145), (0x00, 145), (0x08, 255)])
def test_other_scales_are_refused_with_tensor_limits_and_remedy(value: int, scale: int) -> None:
    message = rf"{NAME} has a scale of {scale}: kernels compute 18 to 144 \(2\^-109 to 2\^17\) in bfloat16; "
    with pytest.raises(ModelError, match=message + 'set model.dtype to "float32", kernels.experts to "torch"'):
        check_scales(cast(Model, Weights(value, scale)))


@pytest.mark.parametrize("scale", [0, 17])
def test_zeros_may_have_any_small_scale(scale: int) -> None:
    check_scales(cast(Model, Weights(0x08, scale)))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("device", "experts", "is_served"),
    [
        ("cpu", "triton", True),
        pytest.param("cuda:0", "torch", True, marks=pytest.mark.gpu),
        pytest.param("cuda:0", "triton", False, marks=pytest.mark.gpu),
    ],
)
def test_where_a_checkpoint_is_served(
    device: str, experts: str, is_served: bool, checkpoint: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    shutil.copytree(checkpoint("gpt-oss-mxfp4")[0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[NAME][1, 3, 1] = 145
    save_file(tensors, tmp_path / "model.safetensors")
    config = Config(
        model=ModelSection(path=str(tmp_path), dtype="bfloat16", max_len=64),
        worker=WorkerSection(device=device),
        kernels=KernelsSection(experts=experts),
        kv=KVSection(pool_bytes=4 << 20),
    )
    refused: AbstractContextManager[object] = nullcontext() if is_served else pytest.raises(ModelError, match=NAME)
    with refused, lone_engine(config, step_tokens=16, logit_rows=2) as engine:
        assert engine.model.config.vocab_size
