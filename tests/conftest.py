"""Fixtures that several rooms use."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

import tests.support.interpreter  # noqa: F401  (imported for its effect, before anything imports triton)
from tests.support.checkpoints import write_checkpoint

# How long an example takes says more about what else runs on the machine than about the test. The same tree gives the
# same result: `pytest --hypothesis-profile search` looks for what the usual examples do not show.
settings.register_profile(
    "search",
    parent=settings.default,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("suite", parent=settings.get_profile("search"), derandomize=True)
settings.load_profile("suite")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Other tests and the programs under test use the processors: threads for what is tiny would wait for them."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """A program's main, run by a test, sends the log to a descriptor; another test may get a file by its number."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """`checkpoint(variant)` -> (directory, transformers model); each variant is written once a session."""
    written: dict[str, tuple[Path, Any]] = {}

    def get(variant: str) -> tuple[Path, Any]:
        if variant not in written:
            directory = tmp_path_factory.mktemp(variant)
            written[variant] = (directory, write_checkpoint(variant, directory))
        return written[variant]

    return get
