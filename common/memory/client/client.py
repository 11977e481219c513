"""A worker's connection to its memory server: claims weights and a pool, and notices the end of the server."""

import os
import select
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from common.base.errors import ConfigError, MemoryLost
from common.memory.client.connection import Arrived, Connection
from common.wire.messages.memory import (
    MemoryHello,
    MemoryMessage,
    MemoryTainted,
    MemoryWelcome,
    PoolRegion,
    PoolWanted,
    RegionState,
    WeightsFilled,
    WeightsProgress,
    WeightsRegion,
    WeightsWanted,
)
from common.wire.messages.worker import Message
from common.wire.values.kv_layout import Counts, KVLayout
from common.wire.values.pool_shape import PoolShape

CONNECT_S = 60.0
ANSWER_S = 60.0
STALL_S = 120.0
"""Longest silence about an awaited region; twice the server's limit for a filler."""
REPORT_S = 0.2
"""Shortest time between two progress messages."""
FLUSH_S = 1.0
"""Longest wait for unsent messages before the end."""
Wanted = TypeVar("Wanted", bound=Message)
Progress = Callable[[int, int], None]
"""Called with (bytes filled, bytes in all)."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Memory of the server, claimed by this worker."""

    handle: bytes  # CUDA IPC handle
    descriptor: int | None  # file, on a CPU; the claim's holder closes it
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WeightsClaim(Claim):
    """A region of weights, with the region's state at the time of the claim."""

    state: RegionState


@dataclass(frozen=True, slots=True)
class PoolClaim(Claim):
    """A pool of KV blocks."""

    pool_id: int
    shape: PoolShape


class MemoryClient:
    """A worker's connection to its memory server; claims end with the connection.

    Raises ConfigError if no server answers within `CONNECT_S`, because the server may still be starting. Raises
    MemoryLost when the server hangs up.

    Args:
        summon: called again and again until a server answers; may raise ConfigError.
    """

    def __init__(
        self,
        path: Path,
        worker_id: str,
        epoch: int,
        *,
        is_decoding: bool,
        summon: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = path
        self.connection = _connected(path, MemoryHello(worker_id, epoch, is_decoding), summon)
        self.arrived: deque[Arrived] = deque()
        self.reported_s = 0.0
        try:
            welcome, _ = self._next(ANSWER_S, MemoryWelcome)
        except BaseException:
            self.close()
            raise
        self.server_id, self.server_epoch, self.gate = welcome.server_id, welcome.epoch, welcome.gate

    def claim_weights(self, fingerprint: str, layout: str, num_bytes: int) -> WeightsClaim:
        """Claim a region for weights; raises ConfigError if there is no room."""
        self.send(WeightsWanted(fingerprint, layout, num_bytes))
        region, descriptor = self._next(ANSWER_S, WeightsRegion)
        return WeightsClaim(region.handle, descriptor, region.num_bytes, region.state)

    def claim_pool(self, layout: KVLayout, num_blocks: Counts, floor: Counts = ()) -> PoolClaim:
        """Claim the pool of a layout; a new pool has this shape. Raises ConfigError if there is no room."""
        self.send(PoolWanted(layout, num_blocks, floor))
        region, descriptor = self._next(ANSWER_S, PoolRegion)
        shape = PoolShape(layout, region.num_blocks, region.floor)
        return PoolClaim(region.handle, descriptor, shape.num_bytes, region.pool_id, shape)

    def report(self, num_filled: int) -> None:
        """Report the progress of filling a region; calls within `REPORT_S` send nothing."""
        now_s = time.monotonic()
        if now_s - self.reported_s > REPORT_S:
            self.reported_s = now_s
            self.send(WeightsProgress(num_filled))

    def publish(self, num_bytes: int) -> None:
        """Declare the region filled. All bytes must be written, and must never be written again."""
        self.send(WeightsFilled(num_bytes))

    def wait_filled(self, num_bytes: int, progress: Progress) -> RegionState:
        """Wait until the region is FILLED, or EMPTY because its filler is gone.

        Raises MemoryLost after `STALL_S` of silence.
        """
        while True:
            message, again = self._next(STALL_S, WeightsProgress, WeightsFilled, WeightsRegion)
            if again is not None:
                os.close(again)
            match message:
                case WeightsProgress():
                    progress(message.num_filled, num_bytes)
                case WeightsFilled():
                    progress(num_bytes, num_bytes)
                    return RegionState.FILLED
                case WeightsRegion():
                    return message.state

    def receive(self, *kinds: type[Message]) -> list[Message]:
        """Return arrived messages of these kinds, and keep others; raises MemoryLost."""
        self._read()
        if not self.arrived:
            return []
        messages = [message for message, _ in self.arrived if isinstance(message, kinds)]
        self.arrived = deque(arrived for arrived in self.arrived if not isinstance(arrived[0], kinds))
        return messages

    def send(self, message: MemoryMessage) -> None:
        """Send a message; raises MemoryLost. Thread-safe, because several threads load weights and report."""
        self.connection.send(message)

    def report_fault(self, problem: str) -> None:
        """Report a fault of the device as the last message; raises MemoryLost."""
        self.send(MemoryTainted(problem))
        self.finish_sending()

    def finish_sending(self) -> None:
        """Wait up to `FLUSH_S` until all is sent; raises MemoryLost."""
        end_s = time.monotonic() + FLUSH_S
        while self.connection.is_sending and (left_s := end_s - time.monotonic()) > 0:
            select.select([], [self.connection], [], left_s)
            self._read()

    def close(self) -> None:
        self.connection.close()

    def _next(self, deadline_s: float, *kinds: type[Wanted]) -> tuple[Wanted, int | None]:
        """Wait for the next message of these kinds.

        Raises MemoryLost after `deadline_s`, and ConfigError for a refusal.
        """
        end_s = time.monotonic() + deadline_s
        while True:
            for index, (message, descriptor) in enumerate(self.arrived):
                if isinstance(message, MemoryTainted):
                    raise MemoryLost(message.problem)
                if isinstance(message, kinds):
                    del self.arrived[index]
                    return message, descriptor
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise MemoryLost(self.connection.problem(f"not a word for {deadline_s:.0f} s"))
            select.select([self.connection], [], [], left_s)
            self._read()

    def _read(self) -> None:
        """Take arrived messages; raises MemoryLost if there are none and the connection has ended."""
        num_arrived = len(self.arrived)
        try:
            self.arrived.extend(self.connection.receive())
        except MemoryLost:
            if len(self.arrived) == num_arrived:
                raise


def _connected(path: Path, hello: MemoryHello, summon: Callable[[], None]) -> Connection:
    end_s, pidfd = time.monotonic() + CONNECT_S, _own_pidfd()
    try:
        while True:
            try:
                return Connection(path, hello, pidfd)
            except PermissionError:
                raise ConfigError(
                    f"worker.memory_socket = {path}: it is another user's memory server, this is user "
                    f"{os.getuid()}; run both as one user"
                ) from None
            except OSError as error:
                if time.monotonic() > end_s:
                    raise ConfigError(
                        f"worker.memory_socket = {path}: {error.strerror} for {CONNECT_S:.0f} s; "
                        "start python -m common.memory with that --memory-socket, or leave it at auto"
                    ) from None
            summon()
            time.sleep(0.05)
    finally:
        os.close(pidfd)


def _own_pidfd() -> int:
    """Return a descriptor of this process, from which the server learns of the end of the process."""
    try:
        return os.pidfd_open(os.getpid())
    except OSError as error:
        raise ConfigError(
            f"pidfd_open: {error.strerror}; a memory server needs it to know when a worker's process is over: "
            "Linux 5.3, Docker 20.10 or a seccomp profile that allows it"
        ) from None
