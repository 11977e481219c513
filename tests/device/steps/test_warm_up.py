"""What a worker runs after its start is compiled before: a step that compiled would hold up every stream."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks.presets import settings as preset_settings
from common.device.engine.engine import Engine
from common.device.engine.step_rules import batch_buckets
from common.device.steps import warm_up
from common.device.steps.prompt_buffers import ALIGNMENT, PromptBuffers, PromptChunk
from common.device.steps.prompt_runner import PromptRunner
from common.device.steps.warm_up import (
    _decode_batches,
    _prompt_batches,
    compile_decode_kernels,
    compile_prompt_kernels,
    warm_up_prompts,
)
from common.kernels.attention.shared_parts import MAX_SHARING_ROWS
from common.models.reading import decoder_config
from common.ops.cuda_latent import FEW_TOKENS
from common.settings.config import Config, ModelSection, WorkerSection
from common.settings.memory_sections import KVSection
from common.wire.values.sampling_params import SamplingParams
from decode_worker.batch.batch import DecodeBatch
from decode_worker.batch.runner import CAPTURE_BYTES, DecodeRunner
from decode_worker.sequences.rows import Fill
from tests.support.engines import lone_engine
from tests.support.layouts import one_table, pool_of, take
from tests.support.sequences import decode_sequence

SAMPLINGS = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, seed=3)]
MAX_ROWS = 64

Compiled = list[str]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """Names of kernels that were compiled, or found on disk, since."""
    import triton

    names: Compiled = []

    def note(*, fn: Any, **_: Any) -> None:
        names.append(fn.name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    return names


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("has_share", [False, True])
@pytest.mark.parametrize(
    ("max_seqs", "max_len", "batch"), [(8, 500, [32, 31]), (8, 9, [4, 3]), (1, 500, None), (8, 3, None)]
)
def test_the_longest_prompt_runs_on_each_stream_and_a_batch_on_one(
    max_seqs: int, max_len: int, batch: list[int] | None, has_share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[list[int], bool]] = []
    monkeypatch.setattr(warm_up, "_run_prompts", lambda runner, lengths, whole_gpu: ran.append((lengths, whole_gpu)))
    runner = SimpleNamespace(
        engine=SimpleNamespace(max_len=max_len),
        buffers=SimpleNamespace(max_tokens=64, max_seqs=max_seqs),
        share=SimpleNamespace(limited=object() if has_share else None),
    )
    warm_up_prompts(cast(PromptRunner, runner))
    lone = [min(64, max_len)]
    expected = [(lone, True), *([(batch, True)] if batch else []), *([(lone, False)] if has_share else [])]
    assert ran == expected


def engine_of(real_shapes: Path, compile_kernels: Callable[[Engine], None], stack: ExitStack) -> Engine:
    config = Config(
        model=ModelSection(path=str(real_shapes)),
        worker=WorkerSection(device="cuda:0"),
        kv=KVSection(pool_bytes=256 << 20),
    )
    return stack.enter_context(lone_engine(config, step_tokens=2048, logit_rows=MAX_ROWS, meanwhile=compile_kernels))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_prompts_compile_nothing(real_shapes: Path, compiled: Compiled, stack: ExitStack) -> None:
    engine = engine_of(real_shapes, compile_prompt_kernels, stack)
    assert compiled, "the hook sees nothing"
    compiled.clear()
    runner = PromptRunner(engine, 2048, 8)
    warm_up_prompts(runner)
    runner.capture()
    for lengths in ([1], [2], [17], [63, 64, 65], [700], [1030], [400] * 4, [2048], [3] * 8):
        blocks = [take(engine.allocator, -(-length // 16)) for length in lengths]
        chunks = [
            PromptChunk([7] * length, 0, [ids], SAMPLINGS[i % 2], is_last=True)
            for i, (length, ids) in enumerate(zip(lengths, blocks, strict=True))
        ]
        runner.run(chunks)
        for ids in blocks:
            engine.allocator.free(ids)
    assert compiled == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_decode_steps_compile_nothing(real_shapes: Path, compiled: Compiled, stack: ExitStack) -> None:
    engine = engine_of(real_shapes, lambda engine: compile_decode_kernels(engine, batch_buckets(MAX_ROWS)), stack)
    batch = DecodeBatch(MAX_ROWS, engine.max_len, engine.pool.shape, engine.vocab_size, engine.device)
    runner = DecodeRunner(engine, batch, MAX_ROWS, use_graphs=True)
    compiled.clear()
    runner.prepare()
    for num_rows in (1, 3, 9, MAX_ROWS):
        changes = [
            Fill(row, decode_sequence("x", [5] * 20, 1, SAMPLINGS[row % 2], one_table(take(engine.allocator, 2))))
            for row in range(num_rows)
        ]
        batch.apply(list(changes))
        runner.launch(num_rows).output()
        runner.launch(num_rows, spared_bytes=CAPTURE_BYTES).output()
    assert set(compiled) <= {"_update_rows_kernel"}, "what is left is not worth a thread"


def stand_in(preset: str) -> Engine:
    """An engine without memory."""
    config = decoder_config(preset_settings(preset))
    layout = SimpleNamespace(groups=config.cache_groups(16, "bfloat16"))
    fields = {"device": torch.device("meta"), "max_len": 100, "pool": SimpleNamespace(layout=layout)}
    return cast(Engine, SimpleNamespace(**fields, model=SimpleNamespace(config=config)))


@pytest.mark.parametrize(("preset", "has_latents"), [("deepseek-v2-lite", True), ("qwen3-4b", False)])
def test_prompts_of_more_keys_than_are_gathered_compile_nothing(preset: str, has_latents: bool) -> None:
    long = [batch for batch in _prompt_batches(stand_in(preset)) if batch.token_ids.shape[0] > FEW_TOKENS]
    assert any(batch.num_keys == 0 for batch in long) == has_latents
    assert any(batch.num_keys > 0 for batch in long)


def test_steps_that_share_are_compiled_where_they_may_be_run() -> None:
    engine = stand_in("qwen3-4b")
    counts = [1, 2, MAX_SHARING_ROWS, MAX_SHARING_ROWS + 1]

    def kinds(*, share_prefixes: bool) -> list[tuple[int, bool]]:
        batches = _decode_batches(engine, counts, share_prefixes=share_prefixes)
        return [(len(batch.seq_lens), batch.prefixes is not None) for batch in batches]

    alone = [(count, False) for count in counts]
    assert kinds(share_prefixes=False) == alone
    assert kinds(share_prefixes=True) == [*alone, (2, True), (MAX_SHARING_ROWS, True)]


def test_inputs_of_prompts_lie_as_memory_of_their_own_would() -> None:
    buffers = PromptBuffers(100, 7, 300, pool_of(1, 16), 290, torch.device("cpu"))
    assert {view.data_ptr() % ALIGNMENT for view in buffers._views.values()} == {0}
    for staging in buffers._stagings:
        assert {array.ctypes.data % ALIGNMENT for array in staging.arrays.values()} == {0}
