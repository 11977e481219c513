"""Engines without a fleet around them, each with a memory server of its own and all blocks of the pool at hand."""

import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.own_memory import own_memory
from common.config import Config
from common.device.engine import Engine, build_engine
from common.memory.shared_pool import SharedPool

DEADLINE_S = 60.0


@contextmanager
def lone_engine(
    config: Config, *, step_tokens: int, logit_rows: int, meanwhile: Callable[[Engine], None] = lambda engine: None
) -> Iterator[Engine]:
    """As `build_engine` has it."""
    with own_memory(config.worker.device) as memory:
        engine = build_engine(config, memory, step_tokens=step_tokens, logit_rows=logit_rows, meanwhile=meanwhile)
        _take_all(engine.shared)
        yield engine


def _take_all(shared: SharedPool) -> None:
    magazine, end_s = shared.magazine, time.monotonic() + DEADLINE_S
    while not magazine.has(magazine.capacity):
        assert time.monotonic() < end_s
        magazine.tend(magazine.shape.layout.nothing, magazine.shape.layout.nothing)
        select.select([shared], [], [], 1.0)
        shared.receive()
