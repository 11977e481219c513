"""What a router hears of a real memory server, and what becomes of that without one; a hub is in the router's place."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from common.base.errors import MemoryLost
from common.memory.client.client import MemoryClient
from common.memory.devices.host_backing import HostBacking
from common.memory.server.announcer import Announcer
from common.memory.server.server import MemoryServer
from common.settings.config import NetSection
from common.settings.memory_sections import MemorySection
from common.wire.messages.memory import WeightsFilled
from common.wire.messages.memory_reports import MemoryHeartbeat, MemoryReady, WorkerEnded
from common.wire.messages.worker import Knock, Message, Refused, Reregister, Welcome
from common.wire.messages.worker_id import BEAT_SUFFIX, connection_of
from common.wire.transport.sockets import Hub

SIZE = 1000
READY = MemoryReady("memory", 7, 1, "1", "cpu")
SERVER = connection_of("memory", 7)
DEADLINE_S = 60.0


class Rig:
    """A memory server in a thread, the place of its router, and workers."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "memory.sock"
        self.net = NetSection(router_endpoint=f"ipc://{directory}/router.sock", heartbeat_s=0.02, worker_timeout_s=1.0)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.announcer = Announcer(self.net, READY)
        self.server = MemoryServer(self.path, HostBacking(), self.announcer, MemorySection())
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        self.clients: list[MemoryClient] = []
        self.hub: Hub | None = None
        self.heard: list[tuple[bytes, Message]] = []

    def connect(self, name: str, epoch: int = 1) -> MemoryClient:
        """Closed with the fixture."""
        self.clients.append(MemoryClient(self.path, name, epoch, is_decoding=False))
        return self.clients[-1]

    def open_router(self) -> Hub:
        self.heard.clear()
        self.hub = Hub(self.context, self.net, self.net.router_endpoint)
        return self.hub

    def close_router(self) -> None:
        if self.hub is not None:
            self.hub.close()
            self.hub = None

    def until(self, condition: Callable[[], object]) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end_s, f"never; heard {self.heard[-5:]}"
            time.sleep(0.002)
            if self.hub is not None:
                self.heard += self.hub.receive()

    def got(self, kind: type[Message]) -> list[Any]:
        return [message for _, message in self.heard if isinstance(message, kind)]

    def rest(self) -> list[Any]:
        """What is said of workers until the next two heartbeats have come."""
        num_beats = len(self.got(MemoryHeartbeat))
        self.until(lambda: len(self.got(MemoryHeartbeat)) >= num_beats + 2)
        return self.got(WorkerEnded)

    def beat(self) -> None:
        """Until it has said some more heartbeats, heard or not."""
        begin_s = self.announcer.beat_s
        self.until(lambda: self.announcer.beat_s > begin_s + 3 * self.net.heartbeat_s)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.stop()
        self.thread.join(DEADLINE_S)
        self.close_router()
        self.server.close()
        self.announcer.close()
        self.context.term()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_a_router_hears_who_it_is_and_how_full(rig: Rig) -> None:
    rig.open_router()
    client = rig.connect("prefill-0")
    assert (client.server_id, client.server_epoch) == ("memory", 7)
    client.claim_weights("model", "layout", SIZE)
    rig.until(lambda: any(beat.weights_bytes for beat in rig.got(MemoryHeartbeat)) and rig.got(MemoryReady))
    assert [said for said in rig.heard if isinstance(said[1], MemoryReady)] == [(SERVER, READY)]
    identity, beat = next(said for said in reversed(rig.heard) if isinstance(said[1], MemoryHeartbeat))
    assert isinstance(beat, MemoryHeartbeat) and identity == SERVER + BEAT_SUFFIX
    assert (beat.server_id, beat.epoch, beat.weights_bytes, beat.worker_ids) == ("memory", 7, SIZE, ("prefill-0",))
    assert beat.free_bytes > 0


def test_a_worker_whose_connection_ends_is_said_to_have_ended(rig: Rig) -> None:
    rig.open_router()
    first, second = rig.connect("prefill-0", 3), rig.connect("decode-0", 4)
    first.close()
    rig.until(lambda: rig.got(WorkerEnded))
    assert rig.got(WorkerEnded) == [WorkerEnded("memory", 7, "prefill-0", 3)]
    second.close()
    rig.until(lambda: len(rig.got(WorkerEnded)) == 2)
    assert rig.got(WorkerEnded)[1] == WorkerEnded("memory", 7, "decode-0", 4)


def test_who_is_let_go_lives_and_is_not_said_to_have_ended(rig: Rig) -> None:
    rig.open_router()
    client = rig.connect("prefill-0")
    client.send(WeightsFilled(SIZE))  # of no region
    rig.until(lambda: not rig.server.clients)
    assert rig.rest() == []


def test_one_connection_speaks_for_an_incarnation(rig: Rig) -> None:
    rig.open_router()
    first = rig.connect("prefill-0", 3)
    with pytest.raises(MemoryLost, match="closed the connection"):
        rig.connect("prefill-0", 3)
    rig.connect("prefill-0", 4)
    assert rig.rest() == []
    first.close()
    rig.until(lambda: rig.got(WorkerEnded))
    assert rig.got(WorkerEnded) == [WorkerEnded("memory", 7, "prefill-0", 3)]


def test_after_an_outage_of_the_router_it_registers_when_asked(rig: Rig) -> None:
    rig.open_router()
    rig.until(lambda: rig.got(MemoryHeartbeat) and rig.got(MemoryReady))
    rig.close_router()
    client = rig.connect("prefill-0")
    rig.beat()
    client.close()
    rig.until(lambda: not rig.server.clients)
    rig.beat()
    hub = rig.open_router()
    rig.until(lambda: rig.got(MemoryHeartbeat))
    hub.send(SERVER + BEAT_SUFFIX, Reregister(1))
    rig.until(lambda: rig.got(MemoryReady))
    hub.send(SERVER, Welcome(1))
    hub.send(SERVER, Knock(1))
    rig.rest()
    assert len(rig.got(MemoryReady)) == 1
    assert not any(beat.worker_ids for beat in rig.got(MemoryHeartbeat)), "it says how things are, not how they were"


def test_where_heartbeats_waited_and_each_is_answered_it_registers_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    hub = rig.open_router()
    rig.until(lambda: rig.got(MemoryReady))
    rig.announcer.heartbeat_s = DEADLINE_S
    rig.announcer.announced_s -= DEADLINE_S
    for _ in range(7):
        hub.send(SERVER, Reregister(1))
    hub.send(SERVER, Welcome(1))
    rig.until(lambda: "registered with the router" in caplog.text)
    rig.until(lambda: len(rig.got(MemoryReady)) > 1)
    rig.announcer.heartbeat_s = rig.net.heartbeat_s
    rig.rest()
    assert len(rig.got(MemoryReady)) == 2


def test_where_no_router_answers_it_serves_and_says_so_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.announcer.warn_s = 0.0
    assert rig.connect("prefill-0").server_id == "memory"
    rig.until(lambda: "no answer yet from a router at" in caplog.text)
    rig.beat()
    assert caplog.text.count("no answer yet") == 1


def test_a_refused_one_says_no_more_and_serves(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = rig.open_router()
    rig.until(lambda: rig.got(MemoryHeartbeat))
    for _ in range(2):
        hub.send(SERVER + BEAT_SUFFIX, Refused("another has its id"))
    rig.until(lambda: "another has its id" in caplog.text)
    said: list[Message] = []
    for spoke in (rig.announcer.main, rig.announcer.beat):
        monkeypatch.setattr(spoke, "send", said.append)
    rig.beat()  # would it not count them, its loop would turn without a pause
    rig.connect("prefill-0").close()
    rig.until(lambda: not rig.server.clients)
    rig.beat()
    assert not said
    assert caplog.text.count("another has its id") == 1
