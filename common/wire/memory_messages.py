"""What a worker and the memory server of its device say to one another; the rules are those of `messages`."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from common.wire.fields import Epoch, Handle, Label, Range, Text, WorkerId

MAX_BYTES = 1 << 44

NumBytes = Annotated[int, Range(1, MAX_BYTES)]
Bytes = Annotated[int, Range(0, MAX_BYTES)]


class RegionState(IntEnum):
    """How far the weights in a region are."""

    EMPTY = 1
    """Whoever is told so fills it."""
    FILLING = 2
    """Another worker does; `WeightsProgress` and `WeightsFilled` follow, or EMPTY if it dies."""
    FILLED = 3
    """All there, and from now on nobody writes them."""


@dataclass(frozen=True, slots=True)
class MemoryHello:
    """worker -> memory server, first: who it is. What it claims ends with the connection."""

    worker_id: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class MemoryWelcome:
    """memory server -> worker, first: whose connection this is; the worker names it to the router."""

    server_id: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class WeightsWanted:
    """worker -> memory server: a region for the weights of this model in this layout, which is another's, too."""

    fingerprint: Label
    layout: Label
    num_bytes: NumBytes


@dataclass(frozen=True, slots=True)
class WeightsRegion:
    """memory server -> worker: where it is; on a CPU a descriptor comes along. Again if it is EMPTY after all."""

    state: RegionState
    handle: Handle  # of CUDA IPC; "" on a CPU
    num_bytes: NumBytes


@dataclass(frozen=True, slots=True)
class WeightsProgress:
    """the worker that fills a region -> memory server -> those that wait for it."""

    num_filled: Bytes


@dataclass(frozen=True, slots=True)
class WeightsFilled:
    """the worker that filled a region -> memory server -> those that wait for it: every byte is there."""

    num_bytes: NumBytes


@dataclass(frozen=True, slots=True)
class MemoryRefused:
    """memory server -> worker, last: what it cannot have, and why."""

    reason: Text


MemoryMessage = (
    MemoryHello | MemoryWelcome | WeightsWanted | WeightsRegion | WeightsProgress | WeightsFilled | MemoryRefused
)
