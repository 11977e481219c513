"""Slices of a trace: what a worker's loop and its device did from when to when.

Times are whole nanoseconds of the host's monotonic clock, shared by all processes of a machine.
"""

import json
from collections.abc import Callable, Mapping

from common.base.json_file import Json

LOOP, DEVICE = 1, 2
"""Tracks: turns of the loop, and steps of the device."""

Args = Mapping[str, Json]
Key = tuple[str, int]
"""(request_id, attempt)."""


class Tracer:
    """Writer of the slices of a process.

    Args:
        write: takes a line.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def slice(self, track: int, name: str, begin_s: float, end_s: float, args: Args | None = None) -> None:
        """Write a slice; slices of a track nest. `name` is a fixed name without quotes."""
        told = f',"args":{json.dumps(args)}' if args else ""
        begin_ns = round(begin_s * 1e9)
        dur_ns = max(0, round(end_s * 1e9) - begin_ns)
        self._write(f'{{"track":{track},"name":"{name}","begin_ns":{begin_ns},"dur_ns":{dur_ns}{told}}}\n')


def shown(key: Key) -> str:
    """Format an attempt for slices and the log."""
    return f"{key[0]}#{key[1]}"
