"""Three real programs on this machine, started, killed and restarted by the tests."""

import json
import signal
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from tests.e2e.programs import Launch, Program, executed, forked_alone

START_TIMEOUT_S = 120.0
TIMEOUT_S = 60.0
"""For all else that must come; on a machine with much else to do it may take long."""


class System:
    """A router, workers and the owner of their memory over unix sockets; use as a context manager.

    Args:
        silence_s: net.worker_timeout_s, so long that nobody is taken for dead who did not get to run.
        heartbeat_s: net.heartbeat_s, so short that it is soon known who uses which blocks.
        launch: how programs are started; those on a GPU always as a user does.
        memory_flags: of memory servers.
        router_flags: of the router.
    """

    def __init__(
        self,
        model: Path,
        *flags: str,
        device: str = "cpu",
        silence_s: float = 60.0,
        heartbeat_s: float = 0.1,
        launch: Launch = forked_alone,
        memory_flags: Sequence[str] = (),
        router_flags: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.flags = list(flags)
        self.device = device
        self.silence_s, self.heartbeat_s = silence_s, heartbeat_s
        self.directory = tempfile.TemporaryDirectory(prefix="baton-e2e-")
        self.memory_flags, self.router_flags = memory_flags, router_flags
        self.launch = launch if device == "cpu" else executed
        self.processes: dict[str, Program] = {}
        self.homes: dict[str, str] = {}  # by worker, the name of its memory server
        self.url = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait(TIMEOUT_S)
        self.directory.cleanup()

    def start(
        self, prefill: int = 1, decode: int = 1, *, apart: bool = False, homes: dict[str, str] | None = None
    ) -> Self:
        """Start all and wait until it is ready.

        Args:
            apart: decode workers have a memory server of their own, so that blocks are pulled.
            homes: names of memory servers of workers, if they have not all the same.
        """
        self.start_router()
        self.start_memory()
        self.homes = homes or ({f"decode-{i}": "memory-decode" for i in range(decode)} if apart else {})
        for i in range(prefill):
            self.start_worker(f"prefill-{i}")
        for i in range(decode):
            self.start_worker(f"decode-{i}")
        self.wait_ready(prefill, decode)
        return self

    def start_router(self, port: int = 0, *flags: str) -> None:
        self._spawn_serving("router", "router", "--router-port", str(port), *self.router_flags, *flags)
        self.url = self._find("router", "serving http://").split()[-1]

    def start_memory(self, name: str = "memory", *flags: str) -> None:
        """Workers of that home have weights and KV blocks there; who reads a free one reads NaN."""
        self._spawn(
            name, "common.memory", "--memory-id", name, "--memory-device", self.device,
            "--memory-socket", self._memory_socket(name), "--memory-poison-blocks", "true", *self.router_endpoint,
            "--net-heartbeat-s", str(self.heartbeat_s), *self.memory_flags, *flags,
        )  # fmt: skip

    @property
    def router_endpoint(self) -> list[str]:
        return ["--net-router-endpoint", f"ipc://{self.directory.name}/router"]

    def _memory_socket(self, name: str) -> str:
        return f"{self.directory.name}/{name}.sock"

    def start_worker(self, name: str, *flags: str, module: str = "") -> None:
        """Start the worker that its name says, or a variant of it from a module of the tests.

        With its memory server, if none of that name was ever started.
        """
        role, home = name.split("-")[0], self.homes.get(name, "memory")
        if not (Path(self.directory.name) / f"{home}.log").exists() and "--worker-memory-socket" not in flags:
            self.start_memory(home)
        module = module or f"{role}_worker"
        handoff = [] if role == "prefill" else ["--net-handoff-endpoint", f"ipc://{self.directory.name}/{name}"]
        pool = ["--kv-cpu-pool-bytes", str(16 << 20)] if "--kv-pool-bytes" not in [*self.flags, *flags] else []
        memory = ["--worker-memory-socket", self._memory_socket(home)]
        self._spawn_serving(
            name, module, "--worker-id", name, "--worker-device", self.device, "--worker-num-threads", "1",
            *handoff, *memory, *pool, *self._flags_for(name), *flags,
        )  # fmt: skip

    def _flags_for(self, name: str) -> list[str]:
        """The system's flags without those of the other kind of worker."""
        other = "--decode-" if name.startswith("prefill") else "--prefill-"
        pairs = zip(self.flags[::2], self.flags[1::2], strict=True)
        return [part for pair in pairs if not pair[0].startswith(other) for part in pair]

    def wait_ready(self, prefill: int, decode: int) -> None:
        """Until so many are here and every pair has a proven path, and nobody holds what a proof borrowed.

        Whose last heartbeat was amid its proof seems to be half full, and the others get all requests.
        """

        def ready() -> bool:
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} exited\n{self.log(name)}"
            health = self.health()
            workers, paths = health["workers"], health["kv_paths"]
            are_here = len(workers["prefill"]) >= prefill and len(workers["decode"]) >= decode
            have_met = len(paths) >= prefill * decode and not any(path["error"] for path in paths)
            return are_here and have_met and self.all_blocks_free()

        self.until(ready, START_TIMEOUT_S)

    def num_active(self) -> int:
        """Completions that are queued or at workers."""
        return int(self._get("/load")["server_load"])

    def health(self) -> Any:
        return self._get("/health")

    def _get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=TIMEOUT_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return json.load(error)

    def text(self, path: str) -> str:
        """What the router answers there."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=TIMEOUT_S) as response:
            return str(response.read().decode())

    def used_blocks(self) -> dict[str, int]:
        """Blocks that every worker uses, by its last heartbeat; -1 before the first."""
        workers = (worker for role in self.health()["workers"].values() for worker in role)
        return {w["id"]: -1 if w["used_blocks"] is None else w["used_blocks"] for w in workers}

    def in_reserve(self) -> set[str]:
        """The standbys that get nothing."""
        workers = (worker for role in self.health()["workers"].values() for worker in role)
        return {worker["id"] for worker in workers if worker["standby"] and worker["standby"]["in_reserve"]}

    def all_blocks_free(self) -> bool:
        """Nothing is used by a worker, on its way between two, or kept for one that is gone."""
        pools = [server for server in self.health()["memory_servers"] if server["blocks"] is not None]
        on_their_way = [server["offered_blocks"] + server["quarantined_blocks"] for server in pools]
        return not any(on_their_way) and not any(self.used_blocks().values())

    def until(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Wait for a condition."""
        begin_s = time.monotonic()
        while not condition():
            assert time.monotonic() - begin_s < timeout_s, f"not within {timeout_s} s\n{self.logs()}"
            time.sleep(0.02)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal and wait for the process to end; returns its exit status."""
        process = self.processes.pop(name)
        process.send_signal(number)
        return process.wait(TIMEOUT_S)

    def log(self, name: str) -> str:
        """What the last process of that name logged."""
        return (Path(self.directory.name) / f"{name}.log").read_text()

    def logs(self) -> str:
        names = sorted(path.stem for path in Path(self.directory.name).glob("*.log"))
        return "\n".join(f"--- {name}\n{self.log(name)}" for name in names)

    def _spawn_serving(self, name: str, module: str, *flags: str) -> None:
        self._spawn(
            name, module, "--model-path", str(self.model), "--model-name", "m",
            *self.router_endpoint, "--net-worker-timeout-s", str(self.silence_s),
            "--net-heartbeat-s", str(self.heartbeat_s), *flags,
        )  # fmt: skip

    def _spawn(self, name: str, module: str, *flags: str) -> None:
        with (Path(self.directory.name) / f"{name}.log").open("wb") as log:
            self.processes[name] = self.launch(module, flags, log)

    def _find(self, name: str, text: str) -> str:
        """The last log line that holds `text`, waited for."""
        self.until(lambda: text in self.log(name) or self.processes[name].poll() is not None, START_TIMEOUT_S)
        found = [line for line in self.log(name).splitlines() if text in line]
        assert found, f"{name} exited\n{self.log(name)}"
        return found[-1]
