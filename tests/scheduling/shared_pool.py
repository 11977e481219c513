"""Prefill workers that share a pool with what is decoded, in model time: real schedulers, caches of leases and pools.

Turn by turn, two milliseconds each: a step takes a fixed time and a time for each token. A prompt that is complete is
decoded for a while, and then its blocks are free.
"""

from collections import deque
from dataclasses import dataclass, field

from common.memory.blocks.answers import Answer
from common.memory.blocks.pool import User
from common.memory.client.lease_cache import LeaseCache
from common.memory.server.pools import Pools
from common.serving.prompts.scheduler import Chunk, PromptScheduler
from common.wire.messages.memory import (
    BlocksFreed,
    BlocksLeased,
    BlocksWanted,
    KVAccepted,
    KVOffer,
    MemoryMessage,
    PoolShortage,
)
from common.wire.values.packing import pack_ids
from common.wire.values.pool_shape import PoolShape
from prefill_worker.sequence import PrefillSequence
from tests.memory.parties import Bytes
from tests.scheduling.simulation import BLOCK_SIZE, SECTION, STEP_S, TOKEN_S
from tests.support.layouts import no_prefixes, tiny
from tests.support.messages import prefill_request
from tests.support.sequences import is_ending, prompt_scheduler, taken

TURN_S = 0.002
DECODER = 100


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt to come, and for how long it is decoded."""

    arrival_s: float
    num_tokens: int
    decode_s: float
    worker: int


@dataclass
class Worker:
    """A prefill worker: one step at a time."""

    client: int
    leases: LeaseCache
    scheduler: PromptScheduler[PrefillSequence]
    said: deque[MemoryMessage]
    step: list[Chunk[PrefillSequence]] = field(default_factory=list)
    step_ends_s: float = 0.0


class SharedPoolSimulation:
    """Runs a load to the last first token."""

    def __init__(self, num_workers: int, num_blocks: int, reserve: float = 0.05) -> None:
        self.now_s = 0.0
        layout = tiny(BLOCK_SIZE)
        shape = PoolShape(layout, (num_blocks + 1,))
        self.pools = Pools(Bytes, reserve, poisons=False)
        self.pools.want(User(DECODER, ("d", 1), is_decoding=True), layout, shape.num_blocks)
        self.workers = [self._worker(client, shape) for client in range(num_workers)]
        self.decoding: list[tuple[float, KVOffer]] = []
        self.ttft_s: dict[int, float] = {}

    def _worker(self, client: int, shape: PoolShape) -> Worker:
        self.pools.want(User(client, (f"p{client}", 1)), shape.layout, shape.num_blocks)
        said: deque[MemoryMessage] = deque()
        leases = LeaseCache(shape, said.append, clock=lambda: self.now_s)
        scheduler = prompt_scheduler(SECTION, leases, 1 << 30, no_prefixes(leases))
        return Worker(client, leases, scheduler, said)

    def run(self, load: list[Asked]) -> list[float]:
        """Seconds to the first token of each."""
        coming = deque(sorted(enumerate(load), key=lambda item: item[1].arrival_s))
        while len(self.ttft_s) < len(load):
            self.now_s += TURN_S
            assert self.now_s < 10_000, "somebody waits for ever"
            while coming and coming[0][1].arrival_s <= self.now_s:
                number, asked = coming.popleft()
                request = prefill_request(str(number), [0] * asked.num_tokens, turn=number)
                self.workers[asked.worker].scheduler.add(PrefillSequence.of(request))
            for worker in self.workers:
                self._turn(worker, load)
            for end_s, offer in [item for item in self.decoding if item[0] <= self.now_s]:
                self.decoding.remove((end_s, offer))
                self._hear(self.pools.handle(DECODER, BlocksFreed(offer.block_ids, offer.generations)))
        return [self.ttft_s[number] for number in range(len(load))]

    def _turn(self, worker: Worker, load: list[Asked]) -> None:
        if worker.step and worker.step_ends_s <= self.now_s:
            chunks, worker.step = worker.step, []
            worker.scheduler.collected([chunk.sequence for chunk in chunks])
            for sequence in [chunk.sequence for chunk in chunks if is_ending(worker.scheduler, chunk.sequence)]:
                self._hand_over(worker, sequence, load)
        if not worker.step and (chunks := worker.scheduler.schedule()):
            worker.step = chunks
            worker.step_ends_s = self.now_s + STEP_S + TOKEN_S * sum(chunk.num_tokens for chunk in chunks)
            worker.scheduler.launched(chunks)
        worker.leases.update((SECTION.max_batch_tokens // BLOCK_SIZE,), (0,), is_busy=bool(worker.step))
        while worker.said:
            match worker.said.popleft():
                case BlocksWanted() as wanted:
                    self._hear(self.pools.handle(worker.client, wanted))
                case BlocksFreed() as freed:
                    self._hear(self.pools.handle(worker.client, freed))

    def _hand_over(self, worker: Worker, sequence: PrefillSequence, load: list[Asked]) -> None:
        asked = load[int(sequence.request.request_id)]
        self.ttft_s[int(sequence.request.request_id)] = self.now_s - asked.arrival_s
        block_ids = taken(worker.scheduler, sequence)
        generations = worker.leases.release(block_ids)
        ids = pack_ids(block_ids), generations.tobytes()
        offer = KVOffer("d", 1, sequence.request.request_id, 0, 0, *ids, bytes(-(-len(block_ids) // 8)), b"", b"")
        self.pools.handle(worker.client, offer)
        self.pools.handle(DECODER, KVAccepted(offer.request_id, 0))
        self.decoding.append((self.now_s + asked.decode_s, offer))

    def _hear(self, answers: list[Answer]) -> None:
        for client, message, _ in answers:
            if client != DECODER:
                match message:
                    case BlocksLeased():
                        self.workers[client].leases.receive(message)
                    case PoolShortage():
                        self.workers[client].leases.demand.shortage(is_short=message.is_short)
