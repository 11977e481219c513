from collections.abc import Iterator

import pytest

from tests.benchmarks.fake_server import Running


@pytest.fixture
def servers() -> Iterator[Running]:
    running = Running()
    yield running
    running.close()
