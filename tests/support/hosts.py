"""Hosts of a small network: network namespaces on a bridge, with links that can be slow or cut. Needs root."""

import os
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from typing import IO, Self

import pytest

from tests.support.nixl import has_nixl
from tests.support.wire import Wire

PRIVATE = f"/tmp/baton-{os.getuid()}"
NET = "10.91.{}"
"""Of all hosts, with a number that other processes of the machine do not use; the tests' own process is host 254."""


def needs_hosts() -> pytest.MarkDecorator:
    """Return a mark that skips tests where namespaces or NIXL are missing."""
    reason = problem()
    return pytest.mark.skipif(bool(reason), reason=reason)


def problem() -> str:
    """Say why there can be no hosts here; "" if there can."""
    if not has_nixl():
        return "nixl is not installed"
    name = f"bt{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "del", name)
        _run("tc", "-V")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces: {error}"
    return ""


class Hosts:
    """Namespaces by name, each with an address; use as a context manager.

    Args:
        wired: the host whose cable has a `wire`, and is slower.
    """

    def __init__(self, *names: str, wired: str = "") -> None:
        self._id = os.getpid() % 100_000
        self._wired = wired
        self.wire: Wire | None = None
        self.bridge = f"bb{self._id}"
        self._boot_ids: dict[str, IO[str]] = {}
        self._net = _free_net()
        self.addresses = {name: f"{self._net}.{number}" for number, name in enumerate(names, 1)}

    def __enter__(self) -> Self:
        try:
            _run("ip", "link", "add", self.bridge, "type", "bridge")
            _run("ip", "addr", "add", f"{self._net}.254/24", "dev", self.bridge)
            _run("ip", "link", "set", self.bridge, "up")
            for name, address in self.addresses.items():
                space, outside = self._space(name), self._outside(name)
                _run("ip", "netns", "add", space)
                self._connect(name, outside, space)
                _run("ip", "link", "set", outside, "master", self.bridge, "up")
                for words in ("addr add {}/24 dev eth0", "link set eth0 up", "link set lo up"):
                    _run("ip", "-n", space, *words.format(address).split())
        except BaseException:
            self.__exit__()
            raise
        return self

    def _connect(self, name: str, outside: str, space: str) -> None:
        if name != self._wired:
            _run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
            return
        inside = f"w{self._id}{name}"
        self.wire = Wire(inside, outside)
        _run("ip", "link", "set", inside, "netns", space, "name", "eth0")

    def __exit__(self, *_: object) -> None:
        if self.wire is not None:
            self.wire.end()
        for name in self.addresses:
            subprocess.run(["ip", "netns", "del", self._space(name)], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["ip", "link", "del", self.bridge], stderr=subprocess.DEVNULL, check=False)

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """Return a command that runs on a host, in the process that is started."""
        return ["ip", "netns", "exec", self._space(name), *command]

    def apart(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the same with a boot id and a /tmp/baton-UID of the host's own, as on another machine."""
        kernel = "/proc/sys/kernel/random/boot_id"
        mounts = f'mount --bind "$0" {kernel} && mkdir -p -m 700 {PRIVATE} && mount -t tmpfs -o mode=700 own {PRIVATE}'
        boot_id = self._boot_ids[name] = self._boot_ids.get(name) or _boot_id()
        return self.command(name, ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', boot_id.name, *command])

    def pids(self, name: str) -> list[int]:
        """Return all processes of a host."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self._space(name)).split()]

    def slow(self, name: str, mbit_per_s: int) -> None:
        """Limit what a host sends."""
        rate = f"rate {mbit_per_s}mbit burst 128kb latency 400ms".split()
        _run(*self.command(name, ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate]))

    def lose(self, name: str) -> None:
        """Lose packets that a host sends in long bursts, because the queue is short."""
        rate = ["rate", "200mbit", "burst", "66kb", "limit", "70kb"]
        _run(*self.command(name, ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate]))

    def num_lost(self, name: str) -> int:
        """Packets lost since `lose`."""
        words = _run(*self.command(name, ["tc", "-s", "qdisc", "show", "dev", "eth0"])).split()
        return int(words[words.index("(dropped") + 1].rstrip(","))

    def free(self, name: str) -> None:
        """End `slow` and `lose`."""
        _run(*self.command(name, ["tc", "qdisc", "del", "dev", "eth0", "root"]))

    def cut(self, name: str) -> None:
        """Let nothing through, in either direction."""
        _run("ip", "link", "set", self._outside(name), "down")

    def mend(self, name: str) -> None:
        """End `cut`."""
        _run("ip", "link", "set", self._outside(name), "up")

    def _space(self, name: str) -> str:
        return f"b{self._id}{name}"

    def _outside(self, name: str) -> str:
        return f"v{self._id}{name}"


def _free_net() -> str:
    taken = _run("ip", "-o", "addr", "show")
    first = os.getpid() % 256
    nets = (NET.format(number % 256) for number in range(first, first + 256))
    return next(net for net in nets if f" {net}." not in taken)


def _boot_id() -> IO[str]:
    """Make a file with a boot id."""
    file = tempfile.NamedTemporaryFile("w", prefix="boot-id-")  # noqa: SIM115 - it lives as long as the hosts
    file.write(f"{uuid.uuid4()}\n")
    file.flush()
    return file


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
