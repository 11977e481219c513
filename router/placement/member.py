"""A worker as the router sees it: its own statements, and the work assigned to it."""

import math
from dataclasses import dataclass, field

from common.wire.messages.worker import Heartbeat, Role, WorkerReady
from common.wire.messages.worker_id import connection_of
from common.wire.values.kv_layout import Counts
from router.placement.prefix_map import PoolName

NO_TRANSPORT = "none"


@dataclass(frozen=True, slots=True)
class Need:
    """Reason for a standby to serve: the time and the event."""

    since_s: float
    cause: str


@dataclass(slots=True, eq=False)
class Member:
    """An incarnation of a worker: its id with an epoch."""

    ready: WorkerReady
    last_seen_s: float
    joined_s: float = 0.0
    beat: Heartbeat | None = None
    draining: bool = False
    asked_to_leave_s: float = -math.inf  # last request to leave
    replaced: bool = False  # by a new incarnation while alive
    num_unproven: int = 0  # assigned sequences without progress yet
    has_trial: bool = False  # the only unproven sequence is on trial; nothing may join
    need: Need | None = None  # a standby with a need serves like an ordinary worker
    silent: bool = False  # gets no new work until the next heartbeat
    outstanding_tokens: int = 0  # prompt tokens sent, first output token not seen yet
    num_outstanding: int = 0  # prompts counted in `outstanding_tokens`
    overtaking: list[int] = field(default_factory=list)  # lengths of prompts sent ahead of their turn, ascending
    num_assigned: int = 0  # sequences decoded here, now or later
    expected_blocks: Counts = ()  # blocks expected for the assigned sequences
    num_outputs: int = 0  # output tokens of the assigned sequences
    last_turn: int = 0  # turn of the last choice; breaks ties, so idle workers alternate
    step_s: float = 0.0  # mean step time between the last two heartbeats

    def __post_init__(self) -> None:
        self.expected_blocks = self.ready.kv_layout.nothing

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

    @property
    def pool(self) -> PoolName:
        """Owner of the worker's KV blocks; workers with a common pool share prefixes and hand over without copying."""
        ready = self.ready
        return (ready.memory_server_id, ready.pool_id) if ready.memory_server_id else (ready.worker_id, ready.epoch)

    def uses(self, server_id: str, epoch: int) -> bool:
        """Tell whether the worker's pool lies in memory of that memory server."""
        ready = self.ready
        return bool(server_id) and (ready.memory_server_id, ready.memory_server_epoch) == (server_id, epoch)

    @property
    def place(self) -> tuple[Role, str]:
        """Role and device; workers of equal place can replace each other."""
        return self.ready.role, self.gpu

    @property
    def in_reserve(self) -> bool:
        """True for a standby without a need; a standby in reserve gets no requests."""
        return self.ready.standby > 0 and self.need is None

    @property
    def role_name(self) -> str:
        return self.ready.role.name.lower()

    @property
    def state(self) -> str:
        """Short description of the worker's availability, for people."""
        if self.silent:
            return "silent"
        if self.draining:
            return "leaving"
        if self.in_reserve:
            return "in reserve"
        return "standing in" if self.need is not None else "serving"

    @property
    def is_serving(self) -> bool:
        """True if new requests may go to the worker."""
        return not (self.draining or self.silent or self.in_reserve)

    @property
    def num_used_blocks(self) -> int:
        """Blocks of the pool used by the worker itself, without those of other workers sharing the pool."""
        return sum(self.ready.num_blocks) - sum(self.beat.num_free_blocks) if self.beat else 0

    @property
    def chunk_s(self) -> float:
        """Seconds to compute a short prompt at the worker; 0 if unknown."""
        return self.beat.short_prompt_us / 1e6 if self.beat else 0.0

    @property
    def block_us(self) -> int:
        """Microseconds to compute a block of a prompt at the worker; 0 if unknown."""
        return self.beat.prompt_block_us if self.beat else 0

    @property
    def taking_us(self) -> int:
        """Microseconds to take blocks from another pool, besides the copy; 0 if unknown."""
        return self.beat.taking_us if self.beat else 0

    def note(self, beat: Heartbeat) -> None:
        """Take over a heartbeat, and update the mean step time."""
        before = self.beat.steps if self.beat else None
        num_steps = sum(beat.steps.durations) - (sum(before.durations) if before else 0)
        if num_steps > 0:
            self.step_s = (beat.steps.total_us - (before.total_us if before else 0)) / num_steps / 1e6
        self.beat = beat

    @property
    def decode_load(self) -> float:
        """Highest utilization of rows and blocks; 1 is full. Blocks count if held now or expected to be held."""
        ready = self.ready
        num_free = ready.num_blocks if self.beat is None else self.beat.num_free_blocks
        groups = zip(ready.num_blocks, num_free, self.expected_blocks, strict=False)  # a heartbeat is unchecked
        shares = [max(count - free, expected) / max(1, count) for count, free, expected in groups]
        return max(self.num_assigned / max(1, ready.max_num_seqs), *shares)

    def __str__(self) -> str:
        return f"{self.role_name} worker {self.id} (epoch {self.epoch:x}, pid {self.ready.pid})"
