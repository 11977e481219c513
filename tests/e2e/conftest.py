"""What all tests of whole systems share."""

from collections.abc import Iterator

import pytest
import torch

from tests.e2e.programs import end_fork_server


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The programs under test use the processors: several threads for a tiny model would wait for one another."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def programs() -> Iterator[None]:
    """Those that are forked end with the tests."""
    yield
    end_fork_server()
