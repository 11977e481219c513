"""A system on two hosts: the router and prefill workers on one, decode workers and a front on the other."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.e2e.programs import Launch, executed
from tests.e2e.system import System
from tests.support.hosts import Hosts
from tests.support.nixl import secret_file

ROUTER_PORT, DISPATCHER_PORT = 7000, 7001
FRONT, BACK = "a", "b"
"""Hosts of prompts and of decoding."""
BACK_MEMORY = "memory-back"


class TwoHosts(System):
    """Programs on the hosts that their names say. No option chooses NIXL: the hosts differ."""

    router_port = ROUTER_PORT

    def __init__(
        self, hosts: Hosts, model: Path, *flags: str, silence_s: float, memory_flags: Sequence[str] = ()
    ) -> None:
        router = ["--router-host", "0.0.0.0"]
        super().__init__(model, *flags, silence_s=silence_s, memory_flags=memory_flags, router_flags=router)
        self.hosts = hosts

    @property
    def router_endpoint(self) -> list[str]:
        secret = str(secret_file(Path(self.directory.name)))
        endpoint = f"tcp://{self.hosts.addresses[FRONT]}:{self.router_port}"
        return ["--net-router-endpoint", endpoint, "--net-secret-file", secret]

    def start_two(self) -> "TwoHosts":
        """Start a worker of each role, and wait until their path is proven."""
        self.start(1, 1, homes={"decode-0": BACK_MEMORY})
        return self

    def start_router(self, port: int = 0, *flags: str) -> None:
        super().start_router(port, *flags)
        self.url = f"http://{self.hosts.addresses[FRONT]}:{self.url.rpartition(':')[2]}"

    def start_front(self) -> str:
        """Start the front, and return its URL when it has a session."""
        endpoint = f"tcp://{self.hosts.addresses[FRONT]}:{DISPATCHER_PORT}"
        flags = ["--router-port", "0", "--router-front-endpoint", endpoint, *self.router_flags]
        self._spawn_serving("front-0", "router.front", *flags)
        port = self._find("front-0", "serving http://").rpartition(":")[2]
        self._find("front-0", "serves; open choices")
        return f"http://{self.hosts.addresses[BACK]}:{port}"

    def start_worker(self, name: str, *flags: str, module: str = "") -> None:
        endpoint = ["--net-handoff-endpoint", "auto"] if name.startswith("decode") else []
        super().start_worker(name, *endpoint, *flags, module=module)

    def host_of(self, name: str) -> str:
        """Return the host of a program."""
        return BACK if name.startswith(("decode", "front")) or name == BACK_MEMORY else FRONT

    def launch_on(self, host: str) -> Launch:
        """Return how programs of a host are started."""
        return partial(executed, around=self.hosts.apart(host, []))

    def _spawn(self, name: str, module: str, *flags: str) -> None:
        host = self.host_of(name)
        self.launch = self.launch_on(host)
        silence = ["--net-worker-timeout-s", str(self.silence_s)]
        super()._spawn(name, module, *flags, "--net-advertise", self.hosts.addresses[host], *silence)
