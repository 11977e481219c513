"""Endpoints for other hosts: bound on all addresses, told by the one that others can dial."""

import secrets
import socket
import time
from pathlib import Path

import pytest
import zmq

from common.settings.config import NetSection
from common.wire.messages.worker import Knock
from common.wire.transport.endpoints import told, unbound
from common.wire.transport.sockets import Hub, Spoke, handoff_endpoint

WAIT_S = 30.0


def test_all_addresses_are_told_as_the_one_that_others_know() -> None:
    assert told("tcp://0.0.0.0:5570", "10.0.0.1") == told("tcp://*:5570", "10.0.0.1") == "tcp://10.0.0.1:5570"
    assert told("tcp://[::]:5570", "fd00::1") == "tcp://[fd00::1]:5570"
    for kept in ("tcp://127.0.0.1:5570", "ipc:///tmp/a:b/socket"):
        assert told(kept, "10.0.0.1") == kept
    assert told("tcp://0.0.0.0:5570", "") == "tcp://0.0.0.0:5570"
    assert handoff_endpoint(NetSection(advertise="host"), "n") == "tcp://0.0.0.0:*"
    assert handoff_endpoint(NetSection(advertise="host", handoff_endpoint="ipc:///a/b"), "n") == "ipc:///a/b"
    assert handoff_endpoint(NetSection(), "n").endswith("/n.sock")


def _hosts() -> list[str]:
    """Addresses of this machine to dial."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return ["127.0.0.1"]
    return ["127.0.0.1", "::1"]


@pytest.mark.parametrize("advertise", _hosts())
def test_who_dials_what_is_told_arrives(advertise: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(secrets.token_hex(32))
    net = NetSection(advertise=advertise, secret_file=str(secret))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    hub = Hub(context, net, unbound(advertise))
    spoke = Spoke(context, net, told(hub.endpoint, advertise), b"d.1")
    spoke.send(Knock(7))
    end_s, heard = time.monotonic() + WAIT_S, list[object]()
    while not heard and time.monotonic() < end_s:
        heard += hub.receive()
        time.sleep(0.01)
    assert heard == [(b"d.1", Knock(7))]
    spoke.close()
    hub.close()
    context.term()
