"""What processes trace, in Chrome's Trace Event format: slices on tracks, and points of the flow of a request.

Times are of the host's monotonic clock, which is one for all processes of a machine, in microseconds. A flow is a chain
of points, each in the slice that is there at that time; they are all written as steps, as no process knows which is the
first or the last: who merges files does.
"""

import hashlib
import heapq
import json
from collections.abc import Callable, Mapping
from typing import Any

LOOP, DEVICE, FIRST_LANE = 1, 2, 100
"""Tracks: turns of the loop; what the device computes; and lanes, each for one request at a time."""
CATEGORY = "request"

Args = Mapping[str, Any]
Key = tuple[str, int]
"""(request_id, attempt)."""


class Tracer:
    """Writes events of one process.

    Args:
        write: takes a line.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def slice(self, track: int, name: str, begin_s: float, end_s: float, args: Args | None = None) -> None:
        """Something that took a while; slices of one track nest. `name` is one of ours, without quotes."""
        told = f',"args":{json.dumps(args)}' if args else ""
        begin_ns = round(begin_s * 1e9)
        dur_ns = max(0, round(end_s * 1e9) - begin_ns)  # of whole nanoseconds slices nest as they did before
        self._write(f'{{"ph":"X","tid":{track},"name":"{name}","ts":{_us(begin_ns)},"dur":{_us(dur_ns)}{told}}}\n')

    def flow(self, track: int, request_id: str, at_s: float) -> None:
        """The way of a request leads through the slice that is on the track at that time."""
        self._write(
            f'{{"ph":"t","tid":{track},"cat":"{CATEGORY}","name":"{CATEGORY}","id":"{flow_id(request_id)}",'
            f'"ts":{_us(round(at_s * 1e9))}}}\n'
        )


class Lanes:
    """Tracks for what overlaps: a stretch gets one on which nothing else was since its beginning."""

    def __init__(self) -> None:
        self._num_lanes = 0
        self._free: list[tuple[float, int]] = []  # a heap of when each was let go of, and the track

    def take(self, begin_s: float) -> int:
        """A track that is free from then on, until it is let go of."""
        if self._free and self._free[0][0] <= begin_s:
            return heapq.heappop(self._free)[1]
        self._num_lanes += 1
        return FIRST_LANE + self._num_lanes - 1

    def let_go(self, track: int, end_s: float) -> None:
        heapq.heappush(self._free, (end_s, track))


def flow_id(request_id: str) -> str:
    """64 bits in hexadecimal: viewers read an id as such a number."""
    return f"0x{hashlib.blake2b(request_id.encode(), digest_size=8).hexdigest()}"


def shown(key: Key) -> str:
    """As slices and the log name an attempt."""
    return f"{key[0]}#{key[1]}"


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03}"
