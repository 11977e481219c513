"""A worker's connection to the router, with a hub in the router's place."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from msgspec.structs import replace

from common.base.errors import ConfigError
from common.settings.config import NetSection
from common.wire.messages.worker import (
    Heartbeat,
    Message,
    Reregister,
    Role,
    StillBound,
    Welcome,
    WorkerGone,
    WorkerLeaving,
    WorkerReady,
)
from common.wire.messages.worker_id import connection_of
from common.wire.transport.router_link import RouterLink
from common.wire.transport.sockets import Hub
from tests.support.messages import worker_ready

READY = worker_ready("d", Role.DECODE)


def test_a_name_that_the_router_would_not_read_is_a_wrong_setting() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(ConfigError, match=r"WorkerReady\.worker_id.*printable ASCII characters; see worker\.id"):
        RouterLink(context, NetSection(), replace(READY, worker_id="two\nlines"), lambda: None)
    context.term()


@pytest.mark.medium
def test_after_an_outage_of_the_router_a_worker_registers_when_asked_and_says_only_the_last_of_its_beats(
    tmp_path: Path,
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    net = NetSection(router_endpoint=f"ipc://{tmp_path}/router.sock", heartbeat_s=0.05, worker_timeout_s=0.2)
    link = RouterLink(context, net, READY, lambda: None)
    numbered, beat, num_beats = link._heartbeat, link.beat, 0

    def counted() -> Heartbeat:
        nonlocal num_beats
        num_beats += 1
        return replace(numbered(), num_waiting=num_beats)

    link._heartbeat = counted  # type: ignore[method-assign]
    first = Hub(context, net, net.router_endpoint)
    serve(first, link)
    first.close()
    begin = num_beats
    while num_beats < begin + 30:  # that nobody hears
        assert beat.is_alive()
        list(link.receive())
        time.sleep(0.01)
    second = Hub(context, net, net.router_endpoint)
    assert serve(second, link)[0] > begin + 28, "the last of them, and those since"
    link.close()
    second.close()
    context.term()


def serve(hub: Hub, link: RouterLink) -> list[int]:
    """A router that knows nobody at first, until the worker has registered; returns the numbers of its beats."""
    beats, is_registered, deadline_s = list[int](), False, time.monotonic() + 60.0
    while not (is_registered and beats):
        assert time.monotonic() < deadline_s, "nobody registers"
        hub.socket.poll(10)
        for identity, message in hub.receive():
            if isinstance(message, WorkerReady):
                is_registered = True
                hub.send(identity, Welcome(1))
            elif isinstance(message, Heartbeat):
                beats.append(message.num_waiting)
                if not is_registered:
                    hub.send(identity, Reregister(1))
        list(link.receive())
    return beats


class Desk:
    """A worker's link, and the router's end of it."""

    def __init__(self, directory: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        net = NetSection(router_endpoint=f"ipc://{directory}/router.sock", heartbeat_s=0.1, worker_timeout_s=60.0)
        self.hub = Hub(self.context, net, net.router_endpoint)
        self.link = RouterLink(self.context, net, READY, lambda: None)
        self.heard: list[type[Message]] = []
        self.await_at_router(WorkerReady)

    def close(self) -> None:
        self.link.close()
        self.hub.close()
        self.context.term()

    def say(self, message: Message) -> None:
        """From the router; returns when the worker has it."""
        self.hub.send(connection_of(READY.worker_id, READY.epoch), message)
        assert self.link.spoke.socket.poll(60_000)
        list(self.link.receive())

    def await_at_router(self, kind: type[Message]) -> None:
        end_s = time.monotonic() + 60.0
        self.heard.clear()
        while kind not in self.heard:
            assert time.monotonic() < end_s, f"no {kind.__name__}"
            self.hub.socket.poll(10)
            self.heard += [type(message) for _, message in self.hub.receive()]
            self.link.is_needed()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.close()


def test_a_worker_that_is_not_known_registers_once(desk: Desk) -> None:
    num_ready, num_beats, deadline_s = 0, 0, time.monotonic() + 60.0
    while num_beats < 4:
        assert time.monotonic() < deadline_s, "nobody registers"
        desk.hub.socket.poll(10)
        for identity, message in desk.hub.receive():
            if isinstance(message, WorkerReady):
                num_ready += 1
                desk.hub.send(identity, Welcome(2))
            elif num_ready:
                num_beats += 1
            else:
                desk.hub.send(identity, Reregister(2))
        list(desk.link.receive())
    assert num_ready == 1


def test_a_leaving_worker_is_needed_until_the_router_says_that_nothing_is_bound_to_it(desk: Desk) -> None:
    assert not desk.link.is_needed(), "it is not leaving"
    desk.link.leave()
    assert desk.link.is_needed()
    desk.await_at_router(WorkerLeaving)
    desk.say(StillBound(2))
    assert desk.link.is_needed()
    desk.await_at_router(WorkerLeaving)  # it asks again
    desk.say(Welcome(7))  # another router, which does not know that it is leaving
    desk.await_at_router(WorkerLeaving)
    desk.say(StillBound(0))
    assert not desk.link.is_needed()


def test_a_leaving_worker_does_not_wait_for_a_router_that_is_not_there(desk: Desk) -> None:
    desk.say(StillBound(0))  # a router that ends
    desk.link.leave()
    assert not desk.link.is_needed()
    desk.say(Welcome(7))
    assert desk.link.is_needed(), "it may answer yet"
    desk.link.answer_timeout_s = 0.0
    assert not desk.link.is_needed()


def test_a_worker_that_ends_says_so(desk: Desk) -> None:
    desk.link.farewell("drained")
    desk.await_at_router(WorkerGone)
