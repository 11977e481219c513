"""Decode rows in model time: a real scheduler, admission and pool; prompts are handed over as they come."""

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

from common.base.errors import ErrorCode
from common.memory.client.client import MemoryClient, PoolClaim
from common.memory.client.shared_pool import SharedPool
from common.serving.prompts.requests import Key
from common.wire.messages.memory import BlocksLeased
from common.wire.values.packing import pack_ids
from common.wire.values.sampling_params import SamplingParams
from decode_worker.admission import Admission
from decode_worker.arrivals.announced import Announced
from decode_worker.arrivals.arrivals import Arrivals
from decode_worker.arrivals.local_prompts import LocalPrompts
from decode_worker.arrivals.offers import Offers
from decode_worker.arrivals.pulls import Pulls
from decode_worker.sequences.row_queue import RowQueue
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sealing import Sealing
from decode_worker.sequences.sequence import DecodeSequence
from tests.support.allocator import check_owned
from tests.support.layouts import pool_of
from tests.support.messages import decode_request, kv_offer
from tests.support.sequences import blocks_of_rows

BLOCK_SIZE, STEP_S = 4, 0.01
REPLAY_S = 0.1
NUM_BROUGHT = 4000
"""Blocks of prompts that are handed over, in all."""


@dataclass
class Stream:
    """A request: when its prompt is handed over, whose it is, and when it got each token."""

    arrival_s: float
    num_tokens: int
    client: int = 0
    priority: int = 0
    token_times_s: list[float] = field(default_factory=list)
    num_failures: int = 0

    @property
    def longest_gap_s(self) -> float:
        """The longest silence since the first token, which came with the handover."""
        times_s = [self.arrival_s, *self.token_times_s]
        return max(after - before for before, after in pairwise(times_s))


class NoPulls:
    """Stands in for `Pulls`: every prompt is in the worker's own pool."""

    def __init__(self) -> None:
        self.waiting: RowQueue[Any] = RowQueue(lambda client: 0)

    def prepare_next(self) -> bool:
        return False

    has_blocks_for_next = prepare_next

    def start_next(self) -> None: ...


class RowsSimulation:
    """One decode worker with `num_rows` rows and, at hand, all of `num_blocks` blocks."""

    def __init__(self, num_rows: int, num_blocks: int) -> None:
        self.now_s, self.said = 0.0, deque[Any]()
        client = SimpleNamespace(
            connection=SimpleNamespace(send=self.said.append, ask_s=1.0, max_unanswered=10), receive=lambda *_: []
        )
        pool = pool_of(num_blocks + NUM_BROUGHT + 1, BLOCK_SIZE)
        self.shared = SharedPool(cast(MemoryClient, client), PoolClaim(b"", None, 0, 7, pool), clock=lambda: self.now_s)
        ids = range(1, num_blocks + 1)
        self.shared.leases.receive(BlocksLeased(pack_ids(ids), pack_ids([1] * num_blocks)))
        self.free_ids = deque(range(num_blocks + 1, num_blocks + NUM_BROUGHT + 1))  # the prefill worker's
        self.scheduler = DecodeScheduler(self.shared.leases, num_rows, 10_000)
        self.offers = Offers(self.shared, self.scheduler, Sealing(self.shared.leases), self.fail)
        local = SimpleNamespace(rows=SimpleNamespace(wanted=None))
        others = cast(Announced, None), cast(Pulls, NoPulls()), self.offers, cast(LocalPrompts, local)
        self.admission = Admission(self.scheduler, Arrivals(*others), self.fail, clock=lambda: self.now_s)
        self.streams: dict[str, Stream] = {}
        self.num_pauses = 0
        self.coming: list[tuple[float, Stream]] = []

    def run(self, streams: list[Stream]) -> None:
        """Until every stream has all its tokens; a preempted one is handed over again."""
        self.coming = [(stream.arrival_s, stream) for stream in streams]
        while self.coming or self.offers.waiting or self.scheduler.active:
            assert self.now_s < 1000.0, "a sequence waits for ever"
            for entry in [entry for entry in self.coming if entry[0] <= self.now_s]:
                self.coming.remove(entry)
                self.hand_over(entry[1])
            self.step()
            self.check()
            self.now_s += STEP_S

    def hand_over(self, stream: Stream) -> None:
        """Offer a prompt of one block and its first token."""
        name, done = f"r{len(self.streams)}", len(stream.token_times_s)
        self.streams[name] = stream
        sampling = SamplingParams(max_tokens=stream.num_tokens + 1)
        whose = {"client": stream.client, "priority": stream.priority}
        sequence = DecodeSequence.of(
            decode_request(name, [1, 2, 3, *[4] * done], num_outputs=done, sampling=sampling, **whose)
        )
        sequence.handed_over(7)
        sequence.offered_s = self.now_s
        num_blocks = -(-(3 + done) // BLOCK_SIZE)
        self.offers.add(sequence, kv_offer(name, [self.free_ids.popleft() for _ in range(num_blocks)]))

    def step(self) -> None:
        """Do what a turn of the worker's loop does with rows."""
        self.enter(self.admission.fill_rows())
        while self.admission.make_room():
            self.num_pauses += 1
            self.enter(self.admission.fill_rows())
        self.admission.make_blocks()
        self.scheduler.slots.make()
        while self.scheduler.slots.is_starved(self.scheduler.lingering):
            self.fail(self.scheduler.preempt().key, ErrorCode.PREEMPTED, "")
            self.scheduler.slots.make()
        sequences = self.scheduler.launched()
        for sequence in sequences:
            sequence.token_ids.append(4)
            sequence.num_outputs += 1
            self.streams[sequence.request.request_id].token_times_s.append(self.now_s + STEP_S)
            if sequence.num_outputs == sequence.sampling.max_tokens:
                self.scheduler.end(sequence)
        self.scheduler.collected(sequences)

    def enter(self, sequences: list[DecodeSequence]) -> None:
        """Activate what is new; what was paused is back in its row."""
        for sequence in sequences:
            if sequence.key in self.scheduler.reserved:
                self.scheduler.activate(sequence)

    def fail(self, key: Key, code: ErrorCode, reason: str) -> None:
        """Hand a preempted sequence over again a while later, as its replay is."""
        stream = self.streams[key[0]]
        stream.num_failures += 1
        self.coming.append((self.now_s + REPLAY_S, stream))

    def check(self) -> None:
        """Each block has one owner, rows are counted right, and no row is free that a sequence waits for."""
        check_owned(self.shared.leases, blocks_of_rows(self.scheduler))
        scheduler, capacity = self.scheduler, self.scheduler.capacity
        with_row = [s for s in scheduler.active.values() if not s.is_paused]
        assert sum(capacity.num_rows.values()) == sum(capacity.num_rows_of.values()) == len(with_row)
        assert capacity.num_taken == len(with_row) <= capacity.max_num_seqs
