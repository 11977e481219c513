"""Events of a trace in Chrome's Trace Event format: slices on tracks, and points in the flow of a request.

Times are microseconds of the host's monotonic clock, shared by all processes of a machine. A flow is a chain of points,
each inside a slice on the same track. Every point is written as a step, because no process knows the first or the last
point. The merger of the files marks both ends.
"""

import hashlib
import heapq
import json
from collections.abc import Callable, Mapping

from common.base.json_file import Json

LOOP, DEVICE, FIRST_LANE = 1, 2, 100
"""Tracks: turns of the loop; device work; and lanes, each for a single request at a time."""
CATEGORY = "request"

Args = Mapping[str, Json]
Key = tuple[str, int]
"""(request_id, attempt)."""


class Tracer:
    """Writer of the events of a process.

    Args:
        write: takes a line.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def slice(self, track: int, name: str, begin_s: float, end_s: float, args: Args | None = None) -> None:
        """Write an event with a duration; slices of a track nest. `name` is a fixed name without quotes."""
        told = f',"args":{json.dumps(args)}' if args else ""
        begin_ns = round(begin_s * 1e9)
        dur_ns = max(0, round(end_s * 1e9) - begin_ns)  # whole nanoseconds, so rounded slices still nest
        self._write(f'{{"ph":"X","tid":{track},"name":"{name}","ts":{_us(begin_ns)},"dur":{_us(dur_ns)}{told}}}\n')

    def flow(self, track: int, request_id: str, at_s: float) -> None:
        """Write a point in the flow of a request, inside the slice on `track` at `at_s`."""
        self._write(
            f'{{"ph":"t","tid":{track},"cat":"{CATEGORY}","name":"{CATEGORY}","id":"{flow_id(request_id)}",'
            f'"ts":{_us(round(at_s * 1e9))}}}\n'
        )


class Lanes:
    """Tracks for overlapping stretches of time; a stretch gets a track free since the stretch began."""

    def __init__(self) -> None:
        self._num_lanes = 0
        self._free: list[tuple[float, int]] = []  # heap of (end of last use, track)

    def take(self, begin_s: float) -> int:
        """Reserve a track free from `begin_s` on, until `let_go`."""
        if self._free and self._free[0][0] <= begin_s:
            return heapq.heappop(self._free)[1]
        self._num_lanes += 1
        return FIRST_LANE + self._num_lanes - 1

    def let_go(self, track: int, end_s: float) -> None:
        heapq.heappush(self._free, (end_s, track))


def flow_id(request_id: str) -> str:
    """Hash a request id to 64 bits in hexadecimal, because viewers read ids as such numbers."""
    return f"0x{hashlib.blake2b(request_id.encode(), digest_size=8).hexdigest()}"


def shown(key: Key) -> str:
    """Format an attempt for slices and the log."""
    return f"{key[0]}#{key[1]}"


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03}"
