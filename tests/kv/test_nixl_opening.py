"""A pool lent by another host while its agent opens: at once, slowly, never."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from common.base.errors import TransferFailed
from common.kv import nixl
from common.kv.nixl import OPEN_S, NixlPeerPool
from common.kv.pool import KVPool
from common.memory.base.nixl_agent import AgentError
from common.memory.client.peer_pool_client import LentClaim, PeerPoolClient
from common.wire.values.pool_shape import PoolShape
from tests.kv.peer_process import LAYOUT
from tests.memory.server.test_server import eventually

SHAPE = PoolShape(LAYOUT, (4,))


class Opening:
    """A pool whose agent opens when `may_open` is set, by a clock that stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.may_open, self.is_destroyed, self.problem = time.monotonic(), threading.Event(), False, ""
        self.losses: list[str] = []
        monkeypatch.setattr(nixl, "Agent", lambda *_: self.agent())
        monkeypatch.setattr(nixl, "DirectReads", lambda *_: self)
        monkeypatch.setattr(nixl, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        claim = LentClaim(
            b"", None, SHAPE.num_bytes, 1, SHAPE, b"", 0, SHAPE.num_bytes, "tcp", cast(PeerPoolClient, self)
        )
        self.pool = NixlPeerPool(claim, "p")
        self.target = KVPool(SHAPE, torch.zeros(SHAPE.num_bytes, dtype=torch.uint8))

    def agent(self) -> Any:
        assert self.may_open.wait(60)
        if self.problem:
            raise AgentError(self.problem)
        return self

    def lose(self, problem: str) -> None:
        self.losses.append(problem)

    def destroy(self) -> None:
        self.is_destroyed = True

    def close(self) -> None: ...

    def free(self) -> None: ...

    def is_open(self) -> bool:
        return self.pool.is_open(self.target)


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opening]:
    opening = Opening(monkeypatch)
    yield opening
    opening.may_open.set()
    opening.pool.close()
    assert opening.pool.is_over.wait(60)


def test_an_agent_may_take_seconds(opening: Opening) -> None:
    assert not opening.is_open()
    opening.now_s += OPEN_S - 0.1
    assert not opening.is_open()
    opening.may_open.set()
    eventually(opening.is_open)
    opening.now_s += 2 * OPEN_S
    assert opening.is_open() and not opening.losses


def test_an_agent_that_is_late_is_given_up_and_ended_once_it_is_there(opening: Opening) -> None:
    assert not opening.is_open()
    opening.now_s += OPEN_S + 0.1
    for _ in range(2):
        with pytest.raises(TransferFailed, match="pool of worker p: NIXL is not ready after 10 s"):
            opening.is_open()
    assert set(opening.losses) == {opening.pool.problem} and not opening.pool.is_over.is_set()
    opening.may_open.set()
    assert opening.pool.is_over.wait(60) and opening.is_destroyed


def test_an_agent_that_fails_says_why(opening: Opening) -> None:
    opening.problem = "NIXL: no transport"
    assert not opening.is_open()
    opening.may_open.set()

    def has_failed() -> bool:
        try:
            return opening.is_open()
        except TransferFailed as error:
            return str(error) == "pool of worker p: NIXL: no transport"

    eventually(has_failed)
