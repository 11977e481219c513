"""How many KV blocks there is room for on a GPU, whoever of the workers on it makes the pool."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.presets import PRESETS
from common.base.errors import ConfigError
from common.device.engine import pool_budget
from common.device.engine.pool_budget import pool_shape
from common.device.engine.step_rules import CUDA_CONTEXT_BYTES
from common.kernels.attention.decode_parts import MAX_PARTS
from common.kernels.attention.query_parts import query_parts_bytes
from common.kernels.attention.shared_parts import most_shared_slots, shared_parts_bytes
from common.kernels.base.gpu import gpu_of
from common.models.loader import model_bytes
from common.models.reading import read_config
from common.models.sizes.mlp import GatedMLP
from common.ops.cuda_latent import EXPANDED_BYTES
from common.ops.workspaces import parts_bytes
from common.settings.config import Config, DecodeSection, PrefillSection
from common.settings.memory_sections import KVSection
from common.wire.values.kv_layout import KVLayout
from tests.support.layouts import one_group

GPU = torch.device("cuda", 0)
GPU_BYTES = 80 * 10**9
NUM_SMS = 132
BLOCK_TOKENS, LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 16, 36, 32, 8, 128
LAYOUT = one_group("model", LAYERS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS, "bfloat16")
MAX_LEN = 32_768


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a model, beside a GPU."""
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["qwen3-4b"]))
    make_gpu(NUM_SMS, monkeypatch)
    return tmp_path


def make_gpu(num_sms: int, monkeypatch: pytest.MonkeyPatch, gpu_bytes: int = GPU_BYTES) -> None:
    properties = SimpleNamespace(
        name="a GPU",
        major=9,
        minor=0,
        multi_processor_count=num_sms,
        shared_memory_per_block_optin=227 << 10,
        total_memory=gpu_bytes,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def reserved_bytes(directory: Path, config: Config) -> int:
    """For workers, beside weights and pool."""
    model = read_config(directory)
    pool_bytes = pool_shape(config, model, LAYOUT, GPU, MAX_LEN).num_bytes
    return int(config.kv.memory_fraction * GPU_BYTES) - model_bytes(model, "bfloat16") - pool_bytes


def test_there_is_room_for_the_steps_of_each_worker_that_is_to_come(directory: Path) -> None:
    slack = LAYOUT.groups[0].block_bytes
    model = read_config(directory)
    mlp = model.layers[0].mlp
    assert isinstance(mlp, GatedMLP)
    logits_bytes, input_bytes = model.vocab_size * 4, (model.hidden_size + mlp.inner) * 4

    def needed(num_prefill: int, num_decode: int, **sections: PrefillSection | DecodeSection) -> int:
        kv = KVSection(prefill_sharers=num_prefill, decode_sharers=num_decode)
        return reserved_bytes(directory, Config(kv=kv, **sections))  # type: ignore[arg-type]

    nobody, prefill, decode = needed(0, 0), needed(1, 0), needed(0, 1)
    assert 0 <= nobody <= slack
    assert prefill > CUDA_CONTEXT_BYTES + 8192 * input_bytes + 64 * logits_bytes
    assert decode > CUDA_CONTEXT_BYTES + 2048 * input_bytes + 256 * logits_bytes
    assert abs(needed(2, 3) - 2 * prefill - 3 * decode) <= 6 * slack, "each has its own, and not the other's"
    wider = DecodeSection(max_num_seqs=512)
    assert needed(1, 0, decode=wider) == prefill and needed(0, 1, decode=wider) > decode + 256 * logits_bytes
    longer = PrefillSection(max_batch_tokens=16_384)
    assert needed(0, 1, prefill=longer) == decode and needed(1, 0, prefill=longer) > prefill + 8192 * input_bytes


def test_there_is_room_for_the_parts_of_contexts(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as run at once, of each worker that computes prompts, and of each that decodes."""

    def of_decode() -> int:
        return parts_bytes(256, Q_HEADS, KV_HEADS, HEAD_DIM, gpu_of(GPU))

    config = Config(kv=KVSection(prefill_sharers=2, decode_sharers=1), decode=DecodeSection(share_prefixes=False))
    few = reserved_bytes(directory, config) - of_decode()
    make_gpu(10 * NUM_SMS, monkeypatch)
    of_prompts = query_parts_bytes(KV_HEADS, HEAD_DIM, gpu_of(GPU))
    assert min(of_prompts, of_decode()) > 80e6, "or nothing would be seen"
    more = reserved_bytes(directory, config) - of_decode() - few
    assert abs(more - 0.9 * 3 * of_prompts) <= LAYOUT.groups[0].block_bytes


def test_there_is_room_for_what_rows_attend_to_together(directory: Path) -> None:
    """Of each decode worker that may share prefixes."""

    def needed(num_prefill: int, num_decode: int, *, share_prefixes: bool) -> int:
        kv = KVSection(prefill_sharers=num_prefill, decode_sharers=num_decode)
        return reserved_bytes(directory, Config(kv=kv, decode=DecodeSection(share_prefixes=share_prefixes)))

    shared_bytes = shared_parts_bytes(256, most_shared_slots(gpu_of(GPU)), KV_HEADS, HEAD_DIM)
    assert shared_bytes > 80e6, "or nothing would be seen"
    more = needed(2, 3, share_prefixes=True) - needed(2, 3, share_prefixes=False)
    assert abs(more - 3 * shared_bytes) <= LAYOUT.groups[0].block_bytes
    assert needed(2, 0, share_prefixes=True) == needed(2, 0, share_prefixes=False)


def test_without_chunks_there_is_room_for_the_longest_prompt(directory: Path) -> None:
    whole = Config(prefill=PrefillSection(chunking=False))
    chunks = Config(prefill=PrefillSection(max_batch_tokens=MAX_LEN))
    assert reserved_bytes(directory, whole) == reserved_bytes(directory, chunks)


def test_where_too_few_are_left_the_start_ends_with_what_to_change(directory: Path) -> None:
    config = Config(kv=KVSection(decode_sharers=64))
    with pytest.raises(ConfigError, match=r"are left for KV blocks of 2\.36 MB each; .*kv\.decode_sharers"):
        pool_shape(config, read_config(directory), LAYOUT, GPU, MAX_LEN)
    chosen = replace(config, kv=replace(config.kv, pool_bytes=10 * LAYOUT.groups[0].block_bytes))
    assert pool_shape(chosen, read_config(directory), LAYOUT, GPU, MAX_LEN).num_blocks == (10,)


def test_on_a_cpu_a_limit_that_weights_and_blocks_will_not_fit_in_is_told_of(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, config = read_config(directory), Config(kv=KVSection(cpu_pool_bytes=1 << 30))
    needed_bytes = (1 << 30) + model_bytes(model, "float32")
    for had_bytes in (needed_bytes, needed_bytes - 1):
        monkeypatch.setattr(pool_budget, "ram_bytes", lambda had_bytes=had_bytes: had_bytes)
        assert not caplog.records, "there was enough"
        pool_shape(config, model, LAYOUT, torch.device("cpu"), MAX_LEN)
    assert "raise its container's memory limit, or lower kv.cpu_pool_bytes" in caplog.text


def test_expanded_keys_and_parts_of_latent_attention_have_room(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "config.json").write_text(json.dumps(PRESETS["deepseek-v2-lite"]))
    model, config = read_config(directory), Config(kv=KVSection(prefill_sharers=1, decode_sharers=0))
    layout = KVLayout("model", model.cache_groups(BLOCK_TOKENS, "bfloat16"))

    def pool_bytes() -> int:
        return pool_shape(config, model, layout, GPU, MAX_LEN).num_bytes

    least = pool_bytes()
    monkeypatch.setattr(type(model), "latents", ())
    parts_bytes = 64 * MAX_PARTS * 16 * 512 * 4
    assert EXPANDED_BYTES + parts_bytes < pool_bytes() - least < 2 * (EXPANDED_BYTES + parts_bytes)


def test_a_pool_in_fp8_holds_twice_the_tokens(directory: Path) -> None:
    model, config = read_config(directory), Config()
    counts: list[int] = []
    for dtype in ("bfloat16", "float8_e4m3fn"):
        layout = KVLayout("model", model.cache_groups(BLOCK_TOKENS, dtype))
        counts += pool_shape(config, model, layout, GPU, MAX_LEN).num_blocks
    assert counts[1] in (2 * counts[0], 2 * counts[0] + 1)
