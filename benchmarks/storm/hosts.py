"""Two hosts of a storm: a system with workers of both roles on each, and the cable between the hosts."""

import os
import signal
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from benchmarks.storm.blows import MEMORY, Kind
from common.settings.config import NetSection
from tests.e2e.programs import ForkServer, Launch
from tests.e2e.two_hosts import BACK, BACK_MEMORY, FRONT, TwoHosts
from tests.support.hosts import Hosts
from tests.support.wire import Weather

DELAY_S, LOSS, OVERTAKING, MBIT_PER_S = 0.02, 0.01, 0.25, 100.0
WEATHERS = {
    Kind.DELAY: Weather(delay_s=DELAY_S),
    Kind.LOSE: Weather(loss=LOSS),
    Kind.SLOW: Weather(mbit_per_s=MBIT_PER_S),
    Kind.REORDER: Weather(delay_s=DELAY_S / 2, overtaking=OVERTAKING),
    Kind.CUT: Weather(is_deaf=True, is_mute=True),
    Kind.LONG_CUT: Weather(is_deaf=True, is_mute=True),
    Kind.DEAFEN: Weather(is_deaf=True),
    Kind.MUTE: Weather(is_mute=True),
}
"""What the cable of the host `BACK` does during a blow."""


class StormHosts(TwoHosts):
    """A system with every second worker of a role on `BACK`, and with a memory server on each host.

    Computing seems slow to prefill workers, so they take blocks from elsewhere. Use as a context manager.
    """

    def __init__(self, hosts: Hosts, model: Path, *flags: str, memory_flags: tuple[str, ...] = ()) -> None:
        net = NetSection()
        super().__init__(hosts, model, *flags, silence_s=net.worker_timeout_s, memory_flags=memory_flags)
        self.heartbeat_s = net.heartbeat_s
        self._fork_servers = {host: ForkServer(hosts.apart(host, [])) for host in (FRONT, BACK)}

    def __exit__(self, *exception: object) -> None:
        self.set(Weather())
        for host in self._fork_servers:
            self.signal_all(host, signal.SIGCONT)
        super().__exit__(*exception)
        for server in self._fork_servers.values():
            server.close()

    def host_of(self, name: str) -> str:
        return BACK if BACK_MEMORY in (name, self.homes.get(name)) else FRONT

    def launch_on(self, host: str) -> Launch:
        return self._fork_servers[host].start

    def start_worker(self, name: str, *flags: str, module: str = "") -> None:
        is_prefill = name.startswith("prefill")
        super().start_worker(name, *flags, module=module or ("tests.e2e.slow_prefill" if is_prefill else ""))

    def set(self, weather: Weather) -> None:
        """Change what the cable does."""
        assert self.hosts.wire is not None
        self.hosts.wire.set(weather)

    def signal_all(self, host: str, number: signal.Signals) -> None:
        """Send a signal to all processes of a host, helpers included."""
        for pid in set(self.hosts.pids(host)) - {self._fork_servers[host].pid}:
            try:
                os.kill(pid, number)
            except ProcessLookupError:  # it has just ended
                continue


def homes_of(workers: Iterable[str]) -> dict[str, str]:
    """Return the memory server of each worker: the first prompts are on one host, their decoding is on the other."""
    nums, homes = Counter[str](), {}
    for name in workers:
        role = name.split("-")[0]
        is_back = (nums[role] + (role == "decode")) % 2
        nums[role] += 1
        homes[name] = BACK_MEMORY if is_back else MEMORY
    return homes
