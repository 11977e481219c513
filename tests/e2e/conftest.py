"""What all tests of whole systems share."""

from collections.abc import Iterator

import pytest

from tests.e2e.programs import end_fork_server


@pytest.fixture(autouse=True, scope="session")
def programs() -> Iterator[None]:
    """Those that are forked end with the tests."""
    yield
    end_fork_server()
