"""The network between simulated hosts: a link of each host, with a queue in either direction."""

from collections import defaultdict

NUM_BYTES_PER_MS = 1e6
"""Of a rate of 1 GB/s."""


class Wires:
    """Links of hosts.

    Args:
        gb_per_s: rate of a link in each direction, as `/health` tells of a pair of workers on two hosts; 0: one host.
    """

    def __init__(self, gb_per_s: float) -> None:
        self.gb_per_s = gb_per_s
        self.busy_ms = defaultdict[int, float](float)  # of each host's link, as a sender
        self._sent_ms, self._received_ms = (defaultdict[int, float](float) for _ in range(2))  # ends of the queues

    def send(self, source: int, target: int, num_bytes: float, begin_ms: float) -> float:
        """Queue bytes at both hosts' links, from `begin_ms` on; return when they have arrived."""
        takes_ms = num_bytes / (self.gb_per_s * NUM_BYTES_PER_MS)
        end_ms = max(begin_ms, self._sent_ms[source], self._received_ms[target]) + takes_ms
        self._sent_ms[source] = self._received_ms[target] = end_ms
        self.busy_ms[source] += takes_ms
        return end_ms
