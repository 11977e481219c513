"""A worker as the router knows it: what it said of itself, and what was assigned to it."""

import math
from dataclasses import dataclass, field

from common.wire.messages.worker import Heartbeat, Role, WorkerReady
from common.wire.messages.worker_id import connection_of
from common.wire.values.kv_layout import Counts
from router.placement.prefix_map import PoolName

NO_TRANSPORT = "none"


@dataclass(frozen=True, slots=True)
class Need:
    """That a standby has to serve: since when, and what happened."""

    since_s: float
    cause: str


@dataclass(slots=True, eq=False)
class Member:
    """One incarnation of one worker."""

    ready: WorkerReady
    last_seen_s: float
    joined_s: float = 0.0
    beat: Heartbeat | None = None
    draining: bool = False
    asked_to_leave_s: float = -math.inf  # last
    replaced: bool = False  # by another of its id, while it lived
    num_unproven: int = 0  # sequences whose prompt or decode it is to compute, and that have not got on
    has_trial: bool = False  # of the only one of those: nothing may join it
    need: Need | None = None  # of a standby, by which it is an ordinary worker
    silent: bool = False  # for so long that it gets nothing until it speaks, or is lost
    outstanding_tokens: int = 0  # sent as prompts, first token not seen yet
    num_outstanding: int = 0  # prompts that those are of
    overtaking: list[int] = field(default_factory=list)  # lengths of those sent ahead of their turn, ascending
    num_assigned: int = 0  # sequences that are to be decoded here
    expected_blocks: Counts = ()  # that those are expected to hold
    num_outputs: int = 0  # tokens of sequences that are, or are to be, decoded here
    last_turn: int = 0  # when it was last chosen; breaks ties, so that idle workers take turns
    step_s: float = 0.0  # of the steps between its last heartbeats, on average

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
        """The identity of its main socket."""
        return connection_of(self.id, self.epoch)

    @property
    def gpu(self) -> str:
        """The device that it shares with others of the same: the GPU's UUID, or "cpu"."""
        return self.ready.device.split()[-1]

    @property
    def pool(self) -> PoolName:
        """Who owns its KV blocks: workers of one pool hand over without copying, and find one another's texts."""
        ready = self.ready
        return (ready.memory_server_id, ready.pool_id) if ready.memory_server_id else (ready.worker_id, ready.epoch)

    def uses(self, server_id: str, epoch: int) -> bool:
        """Whether that memory server is the one whose memory it has."""
        ready = self.ready
        return bool(server_id) and (ready.memory_server_id, ready.memory_server_epoch) == (server_id, epoch)

    @property
    def place(self) -> tuple[Role, str]:
        """Its role and its device: who else is there can do what it does."""
        return self.ready.role, self.gpu

    @property
    def in_reserve(self) -> bool:
        """Whether it is a standby that gets nothing, as nobody needs it."""
        return self.ready.standby > 0 and self.need is None

    @property
    def role_name(self) -> str:
        return self.ready.role.name.lower()

    @property
    def state(self) -> str:
        """Say in a word or two what it does for requests."""
        if self.silent:
            return "silent"
        if self.draining:
            return "leaving"
        if self.in_reserve:
            return "in reserve"
        return "standing in" if self.need is not None else "serving"

    @property
    def is_serving(self) -> bool:
        """Whether new requests may go there."""
        return not (self.draining or self.silent or self.in_reserve)

    @property
    def num_used_blocks(self) -> int:
        """Of its pool, which others may share, those that it uses itself."""
        return sum(self.ready.num_blocks) - sum(self.beat.num_free_blocks) if self.beat else 0

    @property
    def chunk_s(self) -> float:
        """What computing a short prompt takes there; 0 where that is not known."""
        return self.beat.short_prompt_us / 1e6 if self.beat else 0.0

    @property
    def block_us(self) -> int:
        """What computing a block of a prompt takes there; 0 where that is not known."""
        return self.beat.prompt_block_us if self.beat else 0

    @property
    def taking_us(self) -> int:
        """What taking blocks from another pool takes there, beside the copy."""
        return self.beat.taking_us if self.beat else 0

    def note(self, beat: Heartbeat) -> None:
        """It is alive, and as busy as that."""
        before = self.beat.steps if self.beat else None
        num_steps = sum(beat.steps.durations) - (sum(before.durations) if before else 0)
        if num_steps > 0:
            self.step_s = (beat.steps.total_us - (before.total_us if before else 0)) / num_steps / 1e6
        self.beat = beat

    @property
    def decode_load(self) -> float:
        """The fullest of what it has: rows, and blocks, expected to be held or held already; 1 is full."""
        ready = self.ready
        num_free = ready.num_blocks if self.beat is None else self.beat.num_free_blocks
        groups = zip(ready.num_blocks, num_free, self.expected_blocks, strict=False)  # a beat may say what it likes
        shares = [max(count - free, expected) / max(1, count) for count, free, expected in groups]
        return max(self.num_assigned / max(1, ready.max_num_seqs), *shares)

    def __str__(self) -> str:
        return f"{self.role_name} worker {self.id} (epoch {self.epoch:x}, pid {self.ready.pid})"
