"""A worker as the router sees it: its own statements, and the work assigned to it."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from common.wire.messages.worker import Heartbeat, WorkerReady
from common.wire.messages.worker_id import connection_of
from common.wire.values.kv_layout import Counts, KVLayout
from router.placement.predictions import PoolName

NO_TRANSPORT = "none"


@dataclass(frozen=True, slots=True)
class Need:
    """Reason for a standby to serve: the time and the event."""

    since_s: float
    cause: str


class Speeds(NamedTuple):
    """Times measured by a worker; 0 if unknown."""

    step_s: float = 0.0  # mean step between the last two heartbeats
    short_prompt_s: float = 0.0  # decode worker: to compute a short prompt
    block_us: int = 0  # to compute a block of a prompt
    taking_us: int = 0  # to take blocks from another pool, besides the copy

    def after(self, beat: Heartbeat, earlier: Heartbeat | None) -> "Speeds":
        """Return the speeds after a heartbeat; the mean step time stays without a new step."""
        num_steps, total_us = sum(beat.steps.durations), beat.steps.total_us
        if earlier is not None:
            num_steps, total_us = num_steps - sum(earlier.steps.durations), total_us - earlier.steps.total_us
        step_s = total_us / num_steps / 1e6 if num_steps > 0 else self.step_s
        return Speeds(step_s, beat.short_prompt_us / 1e6, beat.prompt_block_us, beat.taking_us)


UNKNOWN = Speeds()


@dataclass(slots=True, eq=False)
class Work:
    """Counters of sequences assigned to a worker and not yet released; changed by `Ledger` alone."""

    member: "Member" = field(repr=False)
    outstanding_tokens: int = 0  # prompt tokens sent, first output token not seen yet
    num_outstanding: int = 0  # prompts counted in `outstanding_tokens`
    overtaking: list[int] = field(default_factory=list)  # lengths of prompts sent ahead of their turn, ascending
    num_assigned: int = 0  # sequences decoded here, now or later
    expected_blocks: Counts = ()  # blocks expected for the assigned sequences
    num_unproven: int = 0  # sequences without progress yet
    has_trial: bool = False  # the only unproven sequence is on trial; nothing may join

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        self.member.changed.add(self.member)


@dataclass(slots=True)
class Outputs:
    """Count of output tokens of the assigned sequences, apart because each token changes it."""

    num_tokens: int = 0


CHOSEN_BY = frozenset({"ready", "beat", "draining", "need", "silent", "last_turn", "speeds"})
"""Fields of a member on which choices depend, besides its work."""


@dataclass(slots=True, eq=False)
class Member:
    """An incarnation of a worker: its id with an epoch."""

    changed: "set[Member]" = field(default_factory=set, kw_only=True, repr=False)
    """Where the member adds itself when anything changes on which choices depend."""
    ready: WorkerReady
    last_seen_s: float
    joined_s: float = 0.0
    number: int = 0  # of all workers that ever joined
    beat: Heartbeat | None = None
    draining: bool = False
    asked_to_leave_s: float = -math.inf  # last request to leave
    replaced: bool = False  # by a new incarnation while alive
    need: Need | None = None  # a standby with a need serves like an ordinary worker
    silent: bool = False  # gets no new work until the next heartbeat
    work: Work = field(init=False)
    outputs: Outputs = field(default_factory=Outputs)
    last_turn: int = 0  # turn of the last choice; breaks ties, so idle workers alternate
    speeds: Speeds = UNKNOWN
    layout: KVLayout = field(init=False)  # an object that workers share if it is equal
    block_size: int = field(init=False)  # tokens of a block
    pool: PoolName = field(init=False)
    """Owner of the worker's KV blocks; workers with a common pool share prefixes and hand over without copying."""

    def __post_init__(self) -> None:
        ready = self.ready
        self.layout = ready.kv_layout
        self.block_size = self.layout.block_size
        owner = (ready.memory_server_id, ready.pool_id) if ready.memory_server_id else (ready.worker_id, ready.epoch)
        self.pool = owner
        self.work = Work(self, expected_blocks=self.layout.nothing)

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name in CHOSEN_BY:
            self.changed.add(self)

    @property
    def id(self) -> str:
        return self.ready.worker_id

    @property
    def epoch(self) -> int:
        return self.ready.epoch

    @property
    def connection(self) -> bytes:
        """Identity of the worker's main socket."""
        return connection_of(self.id, self.epoch)

    @property
    def gpu(self) -> str:
        """Device of the worker, perhaps shared with others: the GPU's UUID, or "cpu"."""
        return self.ready.device.split()[-1]

    def uses(self, server_id: str, epoch: int) -> bool:
        """Tell whether the worker's pool lies in memory of that memory server."""
        ready = self.ready
        return bool(server_id) and (ready.memory_server_id, ready.memory_server_epoch) == (server_id, epoch)

    @property
    def in_reserve(self) -> bool:
        """True for a standby without a need; a standby in reserve gets no requests."""
        return self.ready.standby > 0 and self.need is None

    @property
    def role_name(self) -> str:
        return self.ready.role.name.lower()

    @property
    def is_serving(self) -> bool:
        """True if new requests may go to the worker."""
        return not (self.draining or self.silent or self.in_reserve)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, as if all were of the main group (see `KVLayout.main`)."""
        return self.ready.num_blocks[self.ready.kv_layout.main]

    @property
    def num_used_blocks(self) -> int:
        """Blocks used by the worker itself, counted alike, without those of other workers sharing the pool."""
        if self.beat is None:
            return 0
        pairs = zip(self.ready.num_blocks, self.beat.num_free_blocks, strict=False)  # a heartbeat is unchecked
        return self.ready.kv_layout.in_main(tuple(count - free for count, free in pairs))

    def __str__(self) -> str:
        return f"{self.role_name} worker {self.id} (epoch {self.epoch:x}, pid {self.ready.pid})"
