"""A visit through a gate, as a worker sees it: what is lost on the way ends it, and silence does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from common.base.errors import MemoryLost
from common.memory.client.gate_connection import MAX_UNANSWERED, Gate
from common.memory.client.peer_pool_client import LentClaim, PeerPoolClient
from common.settings.config import NetSection
from common.wire.messages.frames import decode, encode
from common.wire.messages.gates import GateFrame, GateMessage, GateOver, GateVisit, PoolLent
from common.wire.messages.memory import MemoryKnock, MemoryRefused, MemoryTainted, PoolRegion
from common.wire.messages.worker import Message
from common.wire.transport.sockets import Hub
from tests.memory.server.test_server import eventually
from tests.support.messages import LAYOUT

POOL_ID = 7


class Visited:
    """A gate whose words are the test's, and a worker that visits."""

    def __init__(self, directory: Path) -> None:
        net = NetSection(worker_timeout_s=3.0)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.hub = Hub(self.context, net, f"ipc://{directory}/gate")
        self.now_s = 0.0
        gate = Gate(self.hub.endpoint, net, self.context)
        self.client = PeerPoolClient(gate, ("d", 1), POOL_ID, LAYOUT, clock=lambda: self.now_s)
        self.heard: list[Message] = []
        self.identity = b""
        self.hear(1)
        [visit] = self.heard
        assert isinstance(visit, GateVisit) and (visit.pool_id, visit.ucx_transports) == (POOL_ID, "tcp")
        self.visit = visit.visit

    def hear(self, count: int) -> None:
        """Until the worker has said so much."""

        def has_come() -> bool:
            for identity, message in self.hub.receive():
                self.identity = identity
                self.heard.append(message)
            return len(self.heard) >= count

        eventually(has_come)

    def carry(self, number: int, message: Message) -> None:
        self.say(GateFrame(self.visit, number, encode(message)))

    def say(self, message: GateMessage) -> None:
        self.hub.send(self.identity, message)

    def polled(self) -> str:
        self.client.poll()
        return self.client.problem

    def close(self) -> None:
        self.client.close()
        self.hub.close()
        self.context.destroy(linger=0)


@pytest.fixture
def visited(tmp_path: Path) -> Iterator[Visited]:
    tmp_path.chmod(0o700)
    visited = Visited(tmp_path)
    yield visited
    visited.close()


@pytest.mark.parametrize("is_lent_first", [False, True])
def test_a_pool_is_claimed_once_it_is_lent_and_its_place_known(is_lent_first: bool, visited: Visited) -> None:
    def told() -> None:
        visited.carry(0, PoolRegion(POOL_ID, b"", (9,)))

    def lent() -> None:
        visited.say(PoolLent(visited.visit, b"agent", 4096, 10**6))

    first, second = (lent, told) if is_lent_first else (told, lent)
    first()
    visited.say(PoolLent(visited.visit + 1, b"of another visit", 1, 1))
    visited.client.poll()
    assert visited.client.claim is None
    second()
    eventually(lambda: not visited.polled() and visited.client.claim is not None)
    claim = visited.client.claim
    assert isinstance(claim, LentClaim) and (claim.metadata, claim.address, claim.pool_id) == (b"agent", 4096, POOL_ID)


def test_questions_are_answered_in_order_and_an_answer_to_an_earlier_one_proves_nothing(visited: Visited) -> None:
    client = visited.client
    first, second = client.ask(), client.ask()
    visited.hear(3)
    frames = [message for message in visited.heard[1:] if isinstance(message, GateFrame)]
    assert [(each.number, decode(each.frame)) for each in frames] == [(0, MemoryKnock()), (1, MemoryKnock())]
    visited.carry(0, MemoryKnock(5))
    eventually(lambda: client.has_answered(first))
    assert not client.has_answered(second)
    visited.carry(1, MemoryKnock(5))
    eventually(lambda: client.has_answered(second))


LAST_WORDS: dict[str, list[Message]] = {
    "messages 1 to 2 got lost": [GateFrame(0, 0, encode(MemoryKnock())), GateFrame(0, 3, encode(MemoryKnock()))],
    "messages 0 to 0 got lost": [GateFrame(0, 1, encode(MemoryKnock()))],
    "not msgpack": [GateFrame(0, 0, b"?")],
    "there is no pool": [GateFrame(0, 0, encode(MemoryRefused("there is no pool")))],
    "its device": [GateFrame(0, 0, encode(MemoryTainted("its device")))],
    "the lender ended": [GateOver(0, "the lender ended")],
}


@pytest.mark.parametrize("problem", LAST_WORDS)
def test_what_ends_a_visit_is_told_and_no_claim_outlives_it(problem: str, visited: Visited) -> None:
    question = visited.client.ask()
    for message in LAST_WORDS[problem]:
        if isinstance(message, GateFrame):
            visited.say(GateFrame(visited.visit, message.number, message.frame))
        elif isinstance(message, GateOver):
            visited.say(GateOver(visited.visit, message.reason))
    eventually(lambda: problem in visited.polled())
    assert not visited.client.has_answered(question + 1)


def test_silence_for_the_time_of_a_workers_death_is_a_loss(visited: Visited) -> None:
    for _ in range(MAX_UNANSWERED):
        visited.now_s += 0.6
        visited.client.keep_alive()
        assert not visited.client.problem
    visited.now_s += 0.6
    visited.client.keep_alive()
    assert "not a word for" in visited.client.problem
    visited.hear(1 + MAX_UNANSWERED)


def test_an_endpoint_that_cannot_be_dialed_is_said() -> None:
    with zmq.Context() as context, pytest.raises(MemoryLost, match=r"set net\.secret_file"):
        PeerPoolClient(Gate("tcp://10.0.0.1:1", NetSection(), context), ("d", 1), POOL_ID, LAYOUT)
