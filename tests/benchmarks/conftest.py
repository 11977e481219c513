from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support.completions_server import Running


@pytest.fixture
def servers() -> Iterator[Running]:
    with closing(Running()) as running:
        yield running
