"""Who is connected to a memory server, and what it wishes for."""

import math
from dataclasses import dataclass

from common.memory.base.channel import Channel, Gone
from common.wire.messages.memory import PoolWanted, WeightsWanted


@dataclass(frozen=True, slots=True)
class Wish:
    """Memory for which there was no room yet."""

    message: WeightsWanted | PoolWanted
    until_s: float


@dataclass(slots=True)
class Client:
    """A connection."""

    number: int
    channel: Channel
    process: int
    heard_s: float  # when it last said something, or came
    worker: tuple[str, int] | None = None  # its id and epoch, once it has said so
    is_decoding: bool = False
    is_guest: bool = False  # it reads a pool, and has no blocks that it could write
    wish: Wish | None = None
    is_running: bool = False  # it has knocked, as its loop does from now on
    gone: Gone | None = None  # why it is to be let go
    parted_s: float = math.inf  # when its connection ended

    def __str__(self) -> str:
        return f"{self.worker[0]}.{self.worker[1]:x}" if self.worker else f"process {self.process}"
