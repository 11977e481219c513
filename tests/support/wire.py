"""`python -m tests.support.wire INSIDE OUTSIDE`: a cable between two network devices that delays, loses and reorders.

For kernels without netem. Makes two TAP devices and carries frames between them. Reads lines of JSON from stdin, see
`Weather`; prints the devices once they are there, and `Counts` of the weather before after each line.
"""

import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from itertools import count
from typing import Self

ROOM_S, MAX_FRAME = 0.4, 65_536
"""A queue longer than `ROOM_S` at its rate loses what comes."""
TUNSETIFF, TAP_WITHOUT_HEADER = 0x400454CA, 0x1002


@dataclass(frozen=True, slots=True)
class Weather:
    """What happens to frames; `loss` and `overtaking` are parts of them, by chance.

    A frame that overtakes is not delayed. Directions are those of the inner device's host.
    """

    delay_s: float = 0.0
    loss: float = 0.0
    overtaking: float = 0.0
    mbit_per_s: float = 0.0  # 0: as fast as it goes
    is_deaf: bool = False  # nothing arrives
    is_mute: bool = False  # nothing leaves


@dataclass(slots=True)
class Counts:
    """Frames since the last change of the weather."""

    delayed: int = 0
    lost: int = 0
    overtaking: int = 0


class Wire:
    """The process of a cable, started by tests; `end` takes its devices away."""

    def __init__(self, inside: str, outside: str) -> None:
        command = [sys.executable, "-m", "tests.support.wire", inside, outside]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == f"{inside} {outside}\n"

    def set(self, weather: Weather) -> "Counts":
        """Change what happens to frames that are yet to come; return what happened before."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(asdict(weather)), file=self._process.stdin, flush=True)
        return Counts(**json.loads(self._process.stdout.readline()))

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class _Cable:
    """Frames under way between two devices."""

    def __init__(self, inside: int, outside: int) -> None:
        self.weather, self.counts, self._chance, self._numbers = Weather(), Counts(), random.Random(1), count()
        self._inside, self._other = inside, {inside: outside, outside: inside}
        self._free_s = dict.fromkeys(self._other, 0.0)  # when the queue to a device is empty
        self._under_way: list[tuple[float, int, int, bytes]] = []  # due time, number, device

    def take(self, device: int) -> None:
        """Read frames that a device has sent."""
        while True:
            try:
                frame = os.read(device, MAX_FRAME)
            except BlockingIOError:
                return
            due_s = self._due_s(self._other[device], len(frame))
            if due_s is not None:
                heapq.heappush(self._under_way, (due_s, next(self._numbers), self._other[device], frame))

    def give(self) -> float | None:
        """Write frames that are due; return the seconds until the next."""
        while self._under_way and self._under_way[0][0] <= time.monotonic():
            _, _, device, frame = heapq.heappop(self._under_way)
            try:
                os.write(device, frame)
            except OSError:  # the device is down
                continue
        return max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None

    def _due_s(self, device: int, num_bytes: int) -> float | None:
        """Return when a frame arrives at a device; None if it is lost."""
        weather, now_s = self.weather, time.monotonic()
        is_cut = weather.is_deaf if device == self._inside else weather.is_mute
        begin_s = max(now_s, self._free_s[device]) if weather.mbit_per_s else now_s
        if is_cut or begin_s - now_s > ROOM_S or self._chance.random() < weather.loss:
            self.counts.lost += 1
            return None
        if weather.mbit_per_s:
            begin_s += num_bytes * 8 / (weather.mbit_per_s * 1e6)
            self._free_s[device] = begin_s
        if self._chance.random() < weather.overtaking:
            self.counts.overtaking += 1
            return begin_s
        self.counts.delayed += 1
        return begin_s + weather.delay_s


def _tap(name: str) -> int:
    """Make a TAP device, which lives as long as this process."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), TAP_WITHOUT_HEADER))
    return device


def main(inside: str, outside: str) -> None:
    """Carry frames until stdin ends."""
    devices = [_tap(inside), _tap(outside)]
    cable = _Cable(*devices)
    print(inside, outside, flush=True)
    with selectors.DefaultSelector() as selector:
        for device in [*devices, sys.stdin.fileno()]:
            selector.register(device, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(cable.give()):
                if key.fd in devices:
                    cable.take(key.fd)
                elif line := sys.stdin.readline():
                    print(json.dumps(asdict(cable.counts)), flush=True)
                    cable.weather, cable.counts = Weather(**json.loads(line)), Counts()
                else:
                    return


if __name__ == "__main__":
    main(*sys.argv[1:])
