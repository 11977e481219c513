"""How many tokens of prompts are computed at once where memory is short."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.presets import PRESETS
from common.device.engine.pool_budget import pool_shape, sized
from common.device.engine.step_rules import FEWEST_TOKENS
from common.models.reading import read_config
from common.settings.config import Config, DecodeSection, ModelSection, PrefillSection
from common.settings.memory_sections import KVSection
from tests.device.engine.test_pool_budget import GPU, LAYOUT, NUM_SMS, make_gpu

MAX_LEN = 8192


def sizes(config: Config) -> tuple[int, int]:
    found = sized(config, GPU)
    return found.prefill.max_batch_tokens, found.decode.local_chunk_tokens


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["qwen3-8b"]))
    return Config(model=ModelSection(path=str(tmp_path)))


def test_steps_are_smaller_where_memory_is_short_but_not_too_small(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for gigabytes in (141, 80, 40, 30, 22):
        make_gpu(NUM_SMS, monkeypatch, gpu_bytes=gigabytes * 10**9)
        found.append(sizes(config))
    assert found[0] == (8192, 2048)
    assert found == sorted(found, reverse=True) and len(set(found)) >= 3
    assert found[-1] == (FEWEST_TOKENS, FEWEST_TOKENS)


def test_eight_billion_parameters_are_served_within_24_gb(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    make_gpu(NUM_SMS, monkeypatch, gpu_bytes=25_630_000_000)
    config = replace(config, kv=KVSection(memory_fraction=0.98))
    [blocks] = pool_shape(sized(config, GPU), read_config(Path(config.model.path)), LAYOUT, GPU, MAX_LEN).num_blocks
    assert blocks * 16 > 20_000, "tokens"


def test_what_was_chosen_stays(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    make_gpu(NUM_SMS, monkeypatch, gpu_bytes=22 * 10**9)
    chosen = PrefillSection(max_batch_tokens=4096), DecodeSection(local_chunk_tokens=1500)
    assert sizes(replace(config, prefill=chosen[0], decode=chosen[1])) == (4096, 1500)
    assert sizes(replace(config, kv=KVSection(pool_bytes=1 << 30))) == (8192, 2048), "who says the pool's size reckons"


def test_a_cpu_has_its_own_whatever_the_memory(config: Config) -> None:
    found = sized(config, torch.device("cpu"))
    assert (found.prefill.max_batch_tokens, found.decode.local_chunk_tokens) == (1024, 128)
