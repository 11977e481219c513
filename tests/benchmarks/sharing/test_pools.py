"""Pools of two processes on a GPU: all cells fit a card that has room, and a smaller card loses rows first."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.decode_step import MORE_TOKENS
from benchmarks.presets import PRESETS
from benchmarks.sharing.__main__ import ROWS, TOKENS
from benchmarks.sharing.grid import CONTEXT
from benchmarks.sharing.pools import Pools, pools, prompts_of
from common.base.errors import ConfigError
from common.device.engine.pool_budget import pool_shape
from common.models.loader import model_bytes
from common.models.reading import read_config
from common.settings.config import Config
from common.settings.memory_sections import KVSection
from common.wire.values.kv_layout import KVLayout

GPU = torch.device("cuda", 0)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["qwen3-4b"]))
    return tmp_path


def pools_on(gpu_bytes: int, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Pools:
    properties = SimpleNamespace(
        name="a GPU", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=227 << 10,
        total_memory=gpu_bytes,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return pools(str(model_dir), GPU, ROWS, TOKENS, CONTEXT)


def test_all_cells_fit_80_gb_with_weights_twice_and_both_steps(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, model = pools_on(80 * 10**9, model_dir, monkeypatch), read_config(model_dir)
    layout = KVLayout("model", model.cache_groups(Config().kv.block_size, "bfloat16"))
    [group] = layout.groups
    prompts = prompts_of(max(TOKENS), CONTEXT)
    held = {
        found.decode: max(ROWS) * group.num_places(CONTEXT + MORE_TOKENS),
        found.prompt: prompts.number * group.num_places(prompts.num_tokens),
    }
    for pool_bytes, num_blocks in held.items():
        shape = pool_shape(Config(kv=KVSection(pool_bytes=pool_bytes)), model, layout, GPU, model.max_positions)
        assert shape.fits((num_blocks,)) and shape.most_tokens(max(TOKENS)) >= CONTEXT + MORE_TOKENS
        assert not shape.fits((num_blocks * 2,)), "what is needed, and not what is there"
    all_bytes = found.decode + found.prompt + 2 * model_bytes(model, "bfloat16")
    assert all_bytes < 70e9, "steps, CUDA and memory servers have the rest"
    assert pools_on(140 * 10**9, model_dir, monkeypatch) == found


def test_on_a_smaller_gpu_rows_have_what_prompts_leave(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = (pools_on(size * 10**9, model_dir, monkeypatch) for size in (80, 40))
    assert small.prompt == large.prompt and 0 < small.decode < large.decode
    used_bytes = small.decode + small.prompt + 2 * model_bytes(read_config(model_dir), "bfloat16")
    assert 25e9 < used_bytes < 36e9, "most of 90 %, and room for steps"
    with pytest.raises(ConfigError, match="are left for KV blocks"):
        pools_on(12 * 10**9, model_dir, monkeypatch)
