"""What an engine does on which GPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from benchmarks.presets import PRESETS
from common.base.errors import ConfigError, ModelError
from common.device.engine import engine, served_model
from common.device.engine.engine import build_engine, launches_early, resolve_device
from common.kernels.base.gpu import Gpu
from common.memory.client.client import MemoryClient
from common.settings.config import Config, KernelsSection, ModelSection, WorkerSection

Pretend = Callable[[str, tuple[int, int]], torch.device]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """`pretend(name, capability)` -> a device that is said to be that GPU."""

    def gpu(name: str, capability: tuple[int, int]) -> torch.device:
        properties = Gpu(name, capability, num_sms=100, shared_bytes=99 << 10)
        for module in (engine, served_model):
            monkeypatch.setattr(module, "gpu_of", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
        return torch.device("cuda", 0)

    return gpu


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_kernels_start_early_where_the_gpu_can(capability: tuple[int, int], pretend: Pretend) -> None:
    device = pretend("Some GPU", capability)
    assert launches_early(Config(), device) == (capability >= (9, 0))
    assert not launches_early(Config(kernels=KernelsSection(pdl=False)), device)
    assert not launches_early(Config(worker=WorkerSection(cuda_graphs=False)), device)
    assert not launches_early(Config(), torch.device("cpu"))


def test_a_model_that_no_kernel_computes_ends_the_start_before_anything_is_loaded(
    pretend: Pretend, tmp_path: Path
) -> None:
    pretend("NVIDIA A100", (8, 0))
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["qwen3-0.6b"] | {"head_dim": 80}))
    config = Config(model=ModelSection(path=str(tmp_path)), worker=WorkerSection(device="cuda:0"))
    with pytest.raises(ModelError, match=r"head_dim = 80"):
        build_engine(config, cast(MemoryClient, None), step_tokens=16, logit_rows=1)


def test_a_gpu_that_is_too_old_is_refused_by_name(pretend: Pretend) -> None:
    assert pretend("NVIDIA A100", (8, 0)) == resolve_device("cuda:0")
    pretend("Tesla T4", (7, 5))
    with pytest.raises(ConfigError, match=r"Tesla T4 has compute capability 7\.5, kernels need 8\.0 .*cpu"):
        resolve_device("cuda:0")
