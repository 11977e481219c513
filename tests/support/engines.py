"""Engines without a fleet around them, each with a memory server of its own and all blocks of the pool at hand."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.own_memory import own_memory, take_all
from common.device.engine.engine import Engine, build_engine
from common.settings.config import Config


@contextmanager
def lone_engine(
    config: Config, *, step_tokens: int, logit_rows: int, meanwhile: Callable[[Engine], None] = lambda engine: None
) -> Iterator[Engine]:
    """As `build_engine` has it."""
    with own_memory(config.worker.device) as memory:
        engine = build_engine(config, memory, step_tokens=step_tokens, logit_rows=logit_rows, meanwhile=meanwhile)
        take_all(engine.shared)
        yield engine
