"""A worker's end: claims a region of weights, fills it or waits for it, and notices when its server is gone."""

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError, MemoryLost
from common.memory.channel import Channel, Gone
from common.wire.memory_messages import (
    MemoryHello,
    MemoryMessage,
    MemoryRefused,
    MemoryWelcome,
    RegionState,
    WeightsFilled,
    WeightsProgress,
    WeightsRegion,
    WeightsWanted,
)
from common.wire.messages import Message

CONNECT_S = 60.0
ANSWER_S = 60.0
STALL_S = 120.0
"""Without a word about the region that we wait for: twice what the server gives its filler."""
SAY_S = 0.2
Progress = Callable[[int, int], None]
"""Called with (bytes filled, bytes in all)."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A region of weights, as it was when it was claimed."""

    state: RegionState
    handle: bytes  # of CUDA IPC
    descriptor: int | None  # of a file, on a CPU; the holder of the claim closes it
    num_bytes: int


class MemoryClient:
    """One connection, for the life of the worker: what it claims ends with it.

    Raises ConfigError when there is no server within `CONNECT_S`, as it may be starting, too, and MemoryLost when it
    hangs up.
    """

    def __init__(self, path: Path, worker_id: str, epoch: int) -> None:
        self.path = path
        self.channel = Channel(_connected(path), takes_descriptors=True)
        self.arrived: deque[Message] = deque()
        self.said_s = 0.0
        try:
            self.server_id, self.server_epoch = self._introduced(worker_id, epoch)
        except BaseException:
            self.close()
            raise

    def claim_weights(self, fingerprint: str, layout: str, num_bytes: int) -> Claim:
        """Raises ConfigError when there is no room for it."""
        self._send(WeightsWanted(fingerprint, layout, num_bytes))
        message = self._next(ANSWER_S)
        if not isinstance(message, WeightsRegion):
            raise ConfigError(f"{self.path}: {type(message).__name__} where a region was to come")
        return Claim(message.state, message.handle, self.channel.take_descriptor(), message.num_bytes)

    def report(self, num_filled: int) -> None:
        """Say how far a region is that this worker fills; often, and it is said now and then."""
        now_s = time.monotonic()
        if now_s - self.said_s > SAY_S:
            self.said_s = now_s
            self._send(WeightsProgress(num_filled))

    def publish(self, num_bytes: int) -> None:
        """The region is filled; all of it must have been written, and nothing in it be written again."""
        self._send(WeightsFilled(num_bytes))

    def wait_filled(self, num_bytes: int, progress: Progress) -> RegionState:
        """Until the region is FILLED, or EMPTY, as who filled it is gone; raises MemoryLost when neither comes."""
        while True:
            message = self._next(STALL_S)
            if isinstance(message, WeightsProgress):
                progress(message.num_filled, num_bytes)
            elif isinstance(message, WeightsFilled):
                progress(num_bytes, num_bytes)
                return RegionState.FILLED
            elif isinstance(message, WeightsRegion):
                if (again := self.channel.take_descriptor()) is not None:
                    os.close(again)
                return message.state

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Call `on_end` with the reason, from a thread, when the server is gone."""

        def wait() -> None:
            try:
                while True:
                    select.select([self.channel], [], [])
                    list(self.channel.receive())
            except Gone as gone:
                on_end(f"memory server {self.path}: {gone}")
            except (OSError, ValueError):
                return  # closed here

        threading.Thread(target=wait, name="memory", daemon=True).start()

    def close(self) -> None:
        self.channel.close()

    def _introduced(self, worker_id: str, epoch: int) -> tuple[str, int]:
        """The server's id and epoch."""
        self._send(MemoryHello(worker_id, epoch))
        welcome = self._next(ANSWER_S)
        if not isinstance(welcome, MemoryWelcome):
            raise ConfigError(f"{self.path}: {type(welcome).__name__} where a welcome was to come")
        return welcome.server_id, welcome.epoch

    def _send(self, message: MemoryMessage) -> None:
        try:
            self.channel.send(message)
        except Gone as gone:
            raise MemoryLost(f"memory server {self.path}: {gone}") from None

    def _next(self, deadline_s: float) -> Message:
        """The next message; raises MemoryLost without one, and ConfigError for a refusal."""
        end_s = time.monotonic() + deadline_s
        while not self.arrived:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise MemoryLost(f"memory server {self.path}: not a word for {deadline_s:.0f} s")
            select.select([self.channel], [], [], left_s)
            try:
                self.arrived.extend(self.channel.receive())
            except Gone as gone:
                if not self.arrived:
                    raise MemoryLost(f"memory server {self.path}: {gone}") from None
        message = self.arrived.popleft()
        if isinstance(message, MemoryRefused):
            raise ConfigError(message.reason)
        return message


def _connected(path: Path) -> socket.socket:
    end_s = time.monotonic() + CONNECT_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
            return connection
        except OSError as error:
            connection.close()
            if isinstance(error, PermissionError):
                raise ConfigError(
                    f"worker.memory_socket = {path}: it is another user's memory server, this is user "
                    f"{os.getuid()}; run both as one user, or leave it empty"
                ) from None
            if time.monotonic() > end_s:
                raise ConfigError(
                    f"worker.memory_socket = {path}: {error.strerror} for {CONNECT_S:.0f} s; "
                    "start python -m common.memory with that --memory-socket, or leave it empty"
                ) from None
        time.sleep(0.05)
