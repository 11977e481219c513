"""Graphs of prompts on a GPU, with the kernels that workers have there: nothing but speed differs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.device.engine.engine import Engine
from common.device.steps.prompt_buffers import PromptChunk
from common.device.steps.prompt_runner import PromptRunner
from common.settings.config import Config, ModelSection, WorkerSection
from common.settings.memory_sections import KVSection
from common.wire.values.sampling_params import SamplingParams
from tests.support.engines import lone_engine
from tests.support.layouts import take

GREEDY = SamplingParams(temperature=0.0)
Spans = list[tuple[int, int]]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def engine(real_shapes: Path) -> Iterator[Engine]:
    config = Config(
        model=ModelSection(path=str(real_shapes), dtype="float16"),  # the same kernels as bfloat16, with finer rounding
        worker=WorkerSection(device="cuda:0"),
        kv=KVSection(pool_bytes=512 << 20),
    )
    with lone_engine(config, step_tokens=2048, logit_rows=8) as engine:
        yield engine


@pytest.fixture(scope="module")
def with_graphs(engine: Engine) -> PromptRunner:
    runner = PromptRunner(engine, 2048, 8)
    runner.capture()
    return runner


def written(engine: Engine, runner: PromptRunner, steps: list[Spans]) -> list[torch.Tensor]:
    """K and V of each sequence after steps of [begin, end) of each of them: `[tokens, layers, 2, kv_heads, head_dim]`.

    The pool was full of NaN before.
    """
    engine.pool.caches[0].fill_(float("nan"))
    ends = [end for _, end in steps[-1]]
    blocks = [take(engine.allocator, -(-end // 16)) for end in ends]
    for spans in steps:
        chunks = [
            PromptChunk([(row * 7 + i) % 1000 for i in range(begin, end)], begin, [blocks[row]], GREEDY, is_last=True)
            for row, (begin, end) in enumerate(spans)
        ]
        runner.run(chunks)
    for ids in blocks:
        engine.allocator.free(ids)
    return [engine.pool.caches[0][ids].movedim(3, 1).flatten(0, 1)[:end] for ids, end in zip(blocks, ends, strict=True)]


@pytest.mark.parametrize(
    "steps",
    [
        [[(0, 1)]],
        [[(0, 500)]],
        [[(0, 513)]],
        [[(0, 1024)]],
        [[(0, 1100)]],
        [[(0, 2000)]],
        [[(0, 1000), (0, 30), (0, 900)]],
        [[(0, 300), (0, 1), (0, 400)]],
        [[(0, 128)] * 8],
        [[(0, 900)], [(900, 1000)]],
        [[(0, 2000)], [(2000, 2016)]],
        [[(0, 1200), (0, 20)], [(1200, 1216), (20, 60)], [(1216, 1220), (60, 61)]],
        [[(0, 500), (0, 90)], [(500, 1000), (90, 400)]],
    ],
)
def test_graphs_write_what_steps_without_do(steps: list[Spans], engine: Engine, with_graphs: PromptRunner) -> None:
    without = written(engine, PromptRunner(engine, 2048, 8), steps)
    for expected, got in zip(without, written(engine, with_graphs, steps), strict=True):
        assert not expected.isnan().any()
        torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)
