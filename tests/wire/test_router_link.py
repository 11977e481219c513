"""A worker's connection to the router, with a hub in the router's place."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from common.config import NetSection
from common.errors import ConfigError
from common.wire.messages import Heartbeat, Reregister, Role, Welcome, WorkerReady
from common.wire.router_link import RouterLink
from common.wire.sockets import Hub
from tests.fakes import LAYOUT

READY = WorkerReady("d", 1, Role.DECODE, 1, "cpu", "m", "f", "t", LAYOUT, 9, 99, 0, 4, "shm", "")


def test_a_name_that_the_router_would_not_read_is_a_wrong_setting() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(ConfigError, match=r"WorkerReady\.worker_id.*1 to 100 ASCII characters; see worker\.id"):
        RouterLink(context, NetSection(), replace(READY, worker_id="two\nlines"), lambda: None)
    context.term()


def test_after_an_outage_of_the_router_a_worker_registers_as_soon_as_asked_and_not_for_each_beat(
    tmp_path: Path,
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    net = NetSection(router_endpoint=f"ipc://{tmp_path}/router.sock", heartbeat_s=0.05, worker_timeout_s=0.2)
    link = RouterLink(context, net, READY, lambda: None)
    first = Hub(context, net, net.router_endpoint)
    serve(first, link, 0.3)
    first.close()
    time.sleep(1.5)  # 30 beats that nobody hears
    second = Hub(context, net, net.router_endpoint)
    assert 1 <= serve(second, link, 1.5) <= 3
    link.close()
    second.close()
    context.term()


def serve(hub: Hub, link: RouterLink, seconds: float) -> int:
    """A router that knows nobody at first; returns how often the worker registered."""
    num_registered, end_s = 0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        for identity, message in hub.receive():
            if isinstance(message, WorkerReady):
                num_registered += 1
                hub.send(identity, Welcome(1))
            elif isinstance(message, Heartbeat) and not num_registered:
                hub.send(identity, Reregister(1))
        list(link.receive())
        time.sleep(0.005)
    return num_registered
