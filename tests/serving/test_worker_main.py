"""How a worker process ends when something unexpected happens to it."""

from typing import Any

import pytest

from common.serving import worker_main


class Broken:
    """A worker that fails, and then cannot even close."""

    def __init__(self) -> None:
        self.link: Any = self
        self.said: list[str] = []

    def run(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def farewell(self, reason: str) -> None:
        self.said.append(reason)

    def close(self) -> None:
        assert self.said, "the router is told first"
        raise RuntimeError("CUDA error: still")


def test_the_router_hears_of_an_unexpected_error_before_anything_else_can_go_wrong() -> None:
    worker = Broken()
    with pytest.raises(RuntimeError, match="still"):
        worker_main._run(worker)
    assert worker.said == [
        "it met an unexpected error: RuntimeError: CUDA error: an illegal memory access was encountered"
    ]
