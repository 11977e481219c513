"""Hub and spokes: messages go both ways, what is not a message is dropped, strangers stay out."""

import os
import secrets
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import zmq

from common.base.errors import ConfigError
from common.settings.config import NetSection
from common.wire.messages.frames import MAX_FRAME_BYTES, encode
from common.wire.messages.worker import Abort, Message, PeerGone
from common.wire.transport import endpoints, whereabouts
from common.wire.transport.endpoints import require_protected
from common.wire.transport.secret import MAX_BYTES, read_secret
from common.wire.transport.sockets import Hub, Spoke
from tests.support.fakes import free_endpoint

ROOT = Path(__file__).parents[3]
Item = TypeVar("Item")


class Network:
    """Opens sockets and closes them all at the end of a test."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.opened: list[Hub | Spoke | zmq.Socket[bytes]] = []

    def hub(self, endpoint: str = "", net: NetSection | None = None) -> Hub:
        hub = Hub(self.context, net or NetSection(), endpoint or free_endpoint())
        self.opened.append(hub)
        return hub

    def spoke(self, endpoint: str, identity: bytes = b"p0", net: NetSection | None = None) -> Spoke:
        spoke = Spoke(self.context, net or NetSection(), endpoint, identity)
        self.opened.append(spoke)
        return spoke

    def raw(self, endpoint: str) -> "zmq.Socket[bytes]":
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(endpoint)
        self.opened.append(socket)
        return socket


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network()
    yield network
    for opened in network.opened:
        opened.close()
    network.context.term()


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "nothing arrived in time"
        time.sleep(0.005)


def arrivals(receive: Callable[[], Iterator[Item]]) -> list[Item]:
    """What arrives first, waited for."""
    items: list[Item] = []

    def some() -> bool:
        items.extend(receive())
        return bool(items)

    until(some)
    return items


def received(hub: Hub) -> list[tuple[bytes, Message]]:
    return arrivals(hub.receive)


def test_both_ways(network: Network) -> None:
    hub = network.hub()
    spoke = network.spoke(hub.endpoint)
    spoke.send(Abort("r", 1))
    assert received(hub) == [(b"p0", Abort("r", 1))]
    hub.send(b"p0", PeerGone("d", 2))
    assert arrivals(spoke.receive) == [PeerGone("d", 2)]


def test_a_message_sent_before_the_hub_exists_arrives(network: Network, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/hub"
    spoke = network.spoke(endpoint)
    spoke.send(Abort("early", 0))
    assert received(network.hub(endpoint)) == [(b"p0", Abort("early", 0))]


def test_bad_frames_are_counted_and_dropped_and_good_ones_go_on(network: Network) -> None:
    hub = network.hub()
    raw = network.raw(hub.endpoint)
    raw.send(b"noise")
    raw.send_multipart([b"two", b"parts"])
    raw.send(b"")
    good = network.spoke(hub.endpoint)
    good.send(Abort("r", 0))
    assert received(hub) == [(b"p0", Abort("r", 0))]
    until(lambda: not list(hub.receive()) and hub.drops.dropped == 3)


def test_an_oversized_frame_costs_its_sender_the_connection_and_nobody_else(network: Network) -> None:
    hub = network.hub()
    raw = network.raw(hub.endpoint)
    raw.send(b"\0" * (MAX_FRAME_BYTES + 1))
    good = network.spoke(hub.endpoint)
    good.send(Abort("r", 0))
    assert received(hub) == [(b"p0", Abort("r", 0))]


def test_a_message_to_nobody_is_dropped_and_the_sender_learns_of_it(network: Network) -> None:
    hub = network.hub()
    assert not hub.send(b"nobody", Abort("r", 0))
    assert hub.drops.dropped == 1
    assert list(hub.receive()) == []
    spoke = network.spoke(hub.endpoint, b"somebody")
    spoke.send(Abort("r", 0))
    assert received(hub)
    assert hub.send(b"somebody", Abort("r", 0))
    spoke.close()
    until(lambda: not hub.send(b"somebody", Abort("r", 0)))


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5570", "tcp://127.0.0.1:5570", "ipc://@abstract"])
def test_what_other_users_could_reach_needs_a_secret_at_either_end(network: Network, endpoint: str) -> None:
    for open_end in (network.hub, network.spoke):
        with pytest.raises(ConfigError, match=r"can be reached by any user.*set net\.secret_file"):
            open_end(endpoint)


@pytest.mark.parametrize("endpoint", ["ipc://*", "inproc://x", "udp://127.0.0.1:1", "ipc://", "localhost:5570"])
def test_an_endpoint_of_another_kind_is_refused_at_either_end(network: Network, endpoint: str) -> None:
    for open_end in (network.hub, network.spoke):
        with pytest.raises(ConfigError, match=r"tcp://HOST:PORT, ipc://PATH or auto"):
            open_end(endpoint)


def test_a_unix_socket_is_open_to_its_own_user_alone(network: Network, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        network.hub(f"ipc://{tmp_path}/hub.sock")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "hub.sock").stat().st_mode) == 0o600


def test_a_socket_that_is_served_is_not_taken_over_and_one_left_behind_is(network: Network, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/hub.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(f"{tmp_path}/hub.sock")
    hub = network.hub(endpoint)
    with pytest.raises(ConfigError, match="is served by another process"):
        network.hub(endpoint)
    spoke = network.spoke(endpoint)
    spoke.send(Abort("r", 1))
    assert received(hub) == [(b"p0", Abort("r", 1))]


def test_a_taken_port_is_named(network: Network, tmp_path: Path) -> None:
    secret = NetSection(secret_file=_secret(tmp_path / "secret"))
    hub = network.hub("tcp://127.0.0.1:*", secret)
    with pytest.raises(ConfigError, match=r"cannot bind.*is another process using it"):
        network.hub(hub.endpoint, secret)


def test_the_private_directory_is_entered_by_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "PARENT", tmp_path)
    directory = endpoints.private_directory()
    assert directory.parent == tmp_path and stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert endpoints.resolved("auto", "router") == f"ipc://{directory}/router.sock"
    assert endpoints.resolved("ipc://mine", "router") == "ipc://mine"
    directory.chmod(0o755)
    with pytest.raises(ConfigError, match="is not a directory that only user"):
        endpoints.private_directory()
    directory.rmdir()
    directory.symlink_to("/")
    with pytest.raises(ConfigError, match="is not a directory that only user"):
        endpoints.private_directory()


def test_whose_endpoints_are_elsewhere_wants_no_private_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: Network
) -> None:
    (tmp_path / "full").touch()
    monkeypatch.setattr(endpoints, "PARENT", tmp_path / "full")
    network.hub(f"ipc://{tmp_path}/hub.sock")
    whereabouts.forget(8000)
    with pytest.raises(ConfigError, match=r"cannot make .*/full/baton-.*: Not a directory; set net.router_endpoint, "):
        endpoints.resolved(endpoints.AUTO, "router")


def test_sockets_left_in_the_private_directory_are_removed(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "PARENT", tmp_path)
    directory = endpoints.private_directory()
    living = network.hub(endpoints.resolved("auto", "living"))
    for name in ("old", "new"):
        with socket.socket(socket.AF_UNIX) as left_behind:
            left_behind.bind(str(directory / f"{name}.sock"))
    for name in ("old", "living"):
        os.utime(directory / f"{name}.sock", (0, 0))
    network.hub(endpoints.resolved("auto", "next"))
    assert {path.name for path in directory.iterdir()} == {"living.sock", "new.sock", "next.sock"}
    network.spoke(living.endpoint).send(Abort("r", 1))
    assert received(living) == [(b"p0", Abort("r", 1))]


def _secret(path: Path, text: str = "", mode: int = 0o600) -> str:
    """A file with that secret, or a good one."""
    path.write_text(f"{text or secrets.token_hex(32)}\n")
    path.chmod(mode)
    return str(path)


def test_only_those_who_know_the_secret_are_heard(network: Network, tmp_path: Path) -> None:
    secret = NetSection(secret_file=_secret(tmp_path / "secret"))
    hub = network.hub("tcp://0.0.0.0:*", secret)
    endpoint = hub.endpoint.replace("0.0.0.0", "127.0.0.1")
    network.raw(endpoint).send(encode(Abort("forged", 0)))
    wrong = NetSection(secret_file=_secret(tmp_path / "wrong"))
    network.spoke(endpoint, b"stranger", wrong).send(Abort("forged", 0))
    network.spoke(endpoint, b"friend", secret).send(Abort("r", 0))
    assert received(hub) == [(b"friend", Abort("r", 0))]
    time.sleep(0.2)
    assert list(hub.receive()) == []
    with pytest.raises(ConfigError, match="secret_file"):
        network.hub("tcp://0.0.0.0:*", NetSection(secret_file=str(tmp_path / "none")))


@pytest.mark.parametrize("text", ["short", "a" * 64, "0123456789abcdef" * 4, "password" * 8, "x" * (MAX_BYTES + 1)])
def test_a_secret_that_can_be_guessed_is_refused(tmp_path: Path, text: str) -> None:
    reasons = {"short": "5 bytes; at least 32: make one with `openssl rand -hex 32`", "x": "more than 1,048,576 bytes"}
    with pytest.raises(ConfigError) as refused:
        read_secret(_secret(tmp_path / "secret", text))
    assert reasons.get(text.rstrip("x") or "x", "it can be guessed") in str(refused.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o602])
def test_a_secret_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=rf"others may read or write it \(mode {mode:o}\): `chmod 600`"):
        read_secret(_secret(tmp_path / "secret", mode=mode))


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_a_secret_of_another_owner_may_be_his_groups(tmp_path: Path) -> None:
    """Kubernetes lets a container's group read what root has."""
    path = _secret(tmp_path / "secret", mode=0o440)
    os.chown(path, 65_534, 0)
    assert read_secret(path) == Path(path).read_bytes().strip()
    os.chmod(path, 0o444)
    with pytest.raises(ConfigError, match="others may read"):
        read_secret(path)


@pytest.mark.parametrize("mode", [0o1777, 0o770, 0o702])
def test_a_unix_socket_in_a_directory_that_others_may_write_to_needs_a_secret(
    network: Network, tmp_path: Path, mode: int
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(mode)
    endpoint = f"ipc://{tmp_path}/shared/mine.sock"
    for open_end in (network.hub, network.spoke):
        with pytest.raises(ConfigError, match=r"others may write to .*any user there.*mkdir -m 700.*net\.secret_file"):
            open_end(endpoint)
    secret = NetSection(secret_file=_secret(tmp_path / "secret"))
    hub = network.hub(endpoint, secret)
    network.spoke(endpoint, b"friend", secret).send(Abort("r", 0))
    assert received(hub) == [(b"friend", Abort("r", 0))]


def test_a_directory_that_others_may_replace_or_make_is_one_of_theirs(tmp_path: Path) -> None:
    mine = tmp_path / "shared" / "mine"
    mine.mkdir(parents=True, mode=0o700)
    mine.parent.chmod(0o777)
    (tmp_path / "link").symlink_to(mine)
    for where in (mine, tmp_path / "link"):
        with pytest.raises(ConfigError, match=f"others may replace what is in {mine.parent}"):
            require_protected(f"ipc://{where}/s", has_secret=False)
    mine.parent.chmod(0o1777)
    require_protected(f"ipc://{mine}/s", has_secret=False)
    with pytest.raises(ConfigError, match=r"No such file or directory.*any user"):
        require_protected(f"ipc://{mine.parent}/none/s", has_secret=False)
    if os.getuid() == 0:
        os.chown(mine, 65_534, 65_534)
        with pytest.raises(ConfigError, match="belongs to user 65534"):
            require_protected(f"ipc://{mine}/s", has_secret=False)


@pytest.mark.parametrize("kind", ["a named pipe", "a character device", "a directory"])
def test_what_is_no_file_is_no_secret_and_not_waited_for(network: Network, tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    paths = {"a named pipe": tmp_path / "pipe", "a character device": "/dev/zero", "a directory": tmp_path}
    path = str(paths[kind])
    with pytest.raises(ConfigError, match=rf"net\.secret_file = {path}: it is {kind}.*: name a regular file"):
        network.hub("tcp://0.0.0.0:*", NetSection(secret_file=path))


CLOSED_WHILE_UNREAD = """
import sys, time, zmq
from common.settings.config import NetSection
from common.wire.messages.worker import Abort
from common.wire.transport.sockets import Hub, Spoke
from tests.support.fakes import free_endpoint

net = NetSection(heartbeat_s=0.05, worker_timeout_s=0.2, max_queued_messages=10)
context = zmq.Context()
hub = Hub(context, net, f"ipc://{sys.argv[1]}/hub.sock")
spokes = [Spoke(context, net, hub.endpoint, name) for name in (b"taken over", b"taken over", b"flooding")]
for _ in range(2000):
    for spoke in spokes:
        spoke.send(Abort("r" * 100, 0))
    time.sleep(0.0001)
for spoke in spokes:
    spoke.close()
time.sleep(0.5)
"""


@pytest.mark.medium
def test_a_connection_that_closes_while_nobody_reads_it_leaves_the_process_alive(tmp_path: Path) -> None:
    """Be it that its identity went to another connection, or that its queue is full: libzmq must not abort."""
    ran = subprocess.run(
        [sys.executable, "-c", CLOSED_WHILE_UNREAD, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


def test_each_device_has_a_memory_socket_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "PARENT", tmp_path)
    paths = [endpoints.memory_socket("auto", device, "auto") for device in ("", "5d1f", "07ac")]
    assert [path.name for path in paths] == ["memory-cpu.sock", "memory-5d1f.sock", "memory-07ac.sock"]
    assert {path.parent for path in paths} == {endpoints.private_directory()}
    assert endpoints.memory_socket("/here/or.there", "5d1f", "tcp://router:5570") == Path("/here/or.there")
    inside = [endpoints.memory_socket("/run/memory/", device, "tcp://router:5570") for device in ("", "5d1f")]
    assert inside == [Path("/run/memory/memory-cpu.sock"), Path("/run/memory/memory-5d1f.sock")]
    where = [endpoints.shared_directory(choice) for choice in ("auto", "/run/memory/", "/here/or.there")]
    assert where == [endpoints.private_directory(), Path("/run/memory"), None]
    others = {endpoints.memory_socket("auto", "5d1f", f"tcp://router:{port}") for port in (5570, 5571)}
    assert len({*others, *paths}) == 5, "nor is one that of another router"
    assert endpoints.memory_socket("auto", "", endpoints.resolved("auto", "router")) == paths[0]
