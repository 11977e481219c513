"""What all tests of whole systems share."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The programs under test use the processors: several threads for a tiny model would wait for one another."""
    torch.set_num_threads(1)
