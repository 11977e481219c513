"""Clients connected to a memory server, and their open wishes for memory."""

import math
from dataclasses import dataclass

from common.memory.base.channel import Channel, Gone
from common.wire.messages.memory import PoolWanted, WeightsWanted


@dataclass(frozen=True, slots=True)
class Wish:
    """A request for memory that waits for room."""

    message: WeightsWanted | PoolWanted
    until_s: float


@dataclass(slots=True)
class Client:
    """A connection, of a worker after its greeting."""

    number: int
    channel: Channel
    process: int
    heard_s: float  # time of the last message, or of the connection
    worker: tuple[str, int] | None = None  # id and epoch, after the greeting
    is_decoding: bool = False
    is_peer: bool = False  # reads a pool, and leases no blocks
    wish: Wish | None = None
    is_running: bool = False  # has knocked: its loop runs, and knocks again and again
    gone: Gone | None = None  # reason to drop the client
    parted_s: float = math.inf  # time of the connection's end

    def __str__(self) -> str:
        return f"{self.worker[0]}.{self.worker[1]:x}" if self.worker else f"process {self.process}"
