"""Pulls on a bench: prefill workers of other pools, whose copies end when the test says so."""

import os
from collections.abc import Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import zmq

from common.base.errors import ErrorCode, TransferFailed
from common.device.engine.engine import Engine
from common.kv.tables import tables_of
from common.memory.client.client import PoolClaim
from common.memory.client.peer_pool_client import PeerMessage, PeerPoolClient
from common.serving.prompts.requests import Key
from common.serving.worker.peer_servers import PeerServer, PeerServers
from common.settings.config import Config
from common.wire.messages.handoff import KVProgress
from common.wire.messages.memory import KVOffer
from common.wire.messages.worker import Message
from common.wire.transport.sockets import Hub
from common.wire.values.kv_layout import Counts
from common.wire.values.packing import pack_ids
from common.wire.values.pool_shape import PoolShape
from common.wire.values.sampling_params import SamplingParams
from decode_worker.arrivals.announced import Announced
from decode_worker.arrivals.pulls import Pulls
from decode_worker.arrivals.sources import Source, Sources
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sequence import DecodeSequence
from tests.support.allocator import check_owned
from tests.support.layouts import allocator_of, tiny
from tests.support.messages import kv_offer, pool_export
from tests.support.sequences import blocks_ahead, blocks_of_rows, decode_sequence

BLOCK_SIZE = 4
SLOT_ID = 950
"""Blocks of a source in which nothing is written yet are numbered from here on."""
Memory = dict[int, Any]


class Copy:
    """Reads its source when it ends: what a prefill worker did to the blocks meanwhile shows."""

    def __init__(self, source: Memory, target: Memory, pairs: list[tuple[int, int]]) -> None:
        self.source, self.target, self.pairs = source, target, pairs
        self.over = False
        self.is_broken = False

    def end(self) -> None:
        if not self.over and not self.is_broken:
            self.over = True
            for source_id, target_id in self.pairs:
                self.target[target_id] = self.source.get(source_id)

    def done(self) -> bool:
        if self.is_broken:
            raise TransferFailed("the way is blocked")
        return self.over

    def duration_s(self) -> float:
        return 1.0


class FakePool:
    """A source's pool; copies end when the test says so, or when it is closed."""

    shape = PoolShape(tiny(BLOCK_SIZE), (1000,))
    proof_bytes = 0

    def __init__(self) -> None:
        self.memory: Memory = {}
        self.copies: list[Copy] = []
        self.is_broken = False

    def is_open(self, target: Any) -> bool:
        return True

    def pull(self, source_ids: list[int], target: Any, target_ids: list[int]) -> Copy:
        assert source_ids, "a copy of nothing"
        if self.is_broken:
            raise TransferFailed("there is no way")
        self.copies.append(Copy(self.memory, target, list(zip(source_ids, target_ids, strict=True))))
        return self.copies[-1]

    def close(self) -> None:
        for copy in self.copies:
            copy.end()


class FakePeer:
    """A connection to a memory server at which nobody is; what is said there is noted."""

    def __init__(self, pool_id: int) -> None:
        self.pool_id, self.problem = pool_id, ""
        self.claim: PoolClaim | None = None
        self.said: list[tuple[str, str]] = []  # what, of which request
        self.is_closed = False
        self._descriptor = os.eventfd(0)  # at which nothing ever arrives
        self.connection = SimpleNamespace(pollable=self)

    def fileno(self) -> int:
        return self._descriptor

    def poll(self) -> None: ...

    def keep_alive(self) -> None: ...

    def receive(self) -> list[PeerMessage]:
        return []

    def receive_offer(self, offer: KVOffer) -> None: ...

    def accept(self, offer: KVOffer) -> None:
        self.said.append(("accept", offer.request_id))

    def decline(self, offer: KVOffer) -> None:
        self.said.append(("decline", offer.request_id))

    def free(self, said: PeerMessage) -> None:
        self.said.append(("free", said.request_id))

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        os.close(self._descriptor)


def prompt_of(
    name: str, token_ids: Sequence[int], attempt: int = 0, sampling: SamplingParams | None = None
) -> DecodeSequence:
    """A request whose prompt is computed elsewhere."""
    return decode_sequence(name, list(token_ids), 0, sampling, attempt=attempt)


def with_slot(source_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Blocks of a prompt of so many tokens, and the one that its next token lies in."""
    is_full = len(source_ids) * BLOCK_SIZE == num_tokens
    return [*source_ids, *[SLOT_ID + source_ids[-1]][: int(is_full)]]


def reserved(scheduler: DecodeScheduler, sequence: DecodeSequence) -> bool:
    """Reserve a sequence in blocks of its tokens so far, if there is room."""
    counts = scheduler.layout.most_blocks(len(sequence.token_ids), scheduler.capacity.step_tokens)
    if not scheduler.capacity.has_row() or not scheduler.capacity.has_blocks(counts):
        return False
    scheduler.reserve(sequence, tables_of(scheduler.layout, scheduler.allocator.allocate(counts)))
    return True


def met(sources: Sources, pool: FakePool, worker_id: str = "p", pool_id: int = 1) -> FakePeer:
    """A prefill worker of another pool is known to `sources`, its path proven."""
    peer = FakePeer(pool_id)
    sources.peers.poller.register(peer, zmq.POLLIN)
    visit = sources.peers.by_pool[pool_id] = PeerServer(cast(PeerPoolClient, peer), pool, num_workers=1)
    export = pool_export(worker_id, pool_id=pool_id)
    sources.by_id[worker_id] = Source(export, worker_id.encode(), 1.0, visit)
    return peer


class Rig:
    """Pulls from one prefill worker, `p`, or more, each with a memory server of its own."""

    def __init__(self, num_blocks: int = 40, max_num_seqs: int = 8, max_len: int = 1000, allocator: Any = None) -> None:
        self.allocator = allocator or allocator_of(num_blocks, BLOCK_SIZE)
        self.memory, self.said, self.reports = Memory(), list[Message](), list[Message]()
        self.failures: list[tuple[Key, ErrorCode, str]] = []
        self.scheduler = DecodeScheduler(self.allocator, max_num_seqs, max_len)
        shared = SimpleNamespace(pool_id=0, leases=self.allocator, problem="", num_done=0)
        self.engine = engine = cast(
            Engine,
            SimpleNamespace(
                shared=shared,
                pool=self.memory,
                allocator=self.allocator,
                vocab_size=1000,
                transport=SimpleNamespace(name="shm"),
            ),
        )
        hub = cast(Hub, SimpleNamespace(send=lambda identity, message: self.said.append(message)))
        poller = cast(zmq.Poller, SimpleNamespace(register=lambda *_: None, unregister=lambda _: None))
        self.sources = Sources(engine, PeerServers(engine, ("d", 1), poller, Config()), hub, self.reports.append)
        self.announced = Announced(engine.shared)
        self.pulls = Pulls(
            engine,
            self.scheduler,
            Config(),
            self.sources,
            self.announced,
            lambda *failure: self.failures.append(failure),
        )
        self.peers: dict[str, FakePeer] = {}
        self.attempts: dict[str, int] = {}  # the latest that was announced of each request
        self.visits: dict[str, PeerServer] = {}
        self.pool = self.meet("p")

    def meet(self, worker_id: str) -> FakePool:
        """Another prefill worker, proven, in a pool of its own."""
        pool, pool_id = FakePool(), len(self.peers) + 1
        self.peers[worker_id] = met(self.sources, pool, worker_id, pool_id)
        self.visits[worker_id] = self.sources.peers.by_pool[pool_id]
        return pool

    def progress(self, name: str, num_tokens: int, source_ids: list[int], attempt: int = 0, lease: int = 0) -> None:
        """With the generations of a lease of them, of which `lease` is the number; the router announced the prompt."""
        self._announce(prompt_of(name, range(num_tokens), attempt))
        generations = pack_ids(source_id + 100 * lease for source_id in source_ids)
        self.pulls.early.progress(KVProgress("p", 1, name, attempt, num_tokens, pack_ids(source_ids), generations))

    def hand_off(
        self, name: str, num_tokens: int, source_ids: list[int], attempt: int = 0, worker_id: str = "p"
    ) -> None:
        """The prompt is announced and offered."""
        offer = kv_offer(name, with_slot(source_ids, num_tokens), attempt=attempt)
        self.receive(prompt_of(name, range(num_tokens), attempt), offer, worker_id)

    def receive(self, prompt: DecodeSequence, offer: KVOffer, worker_id: str = "p") -> None:
        """The router announces a prompt, and a prefill worker offers it."""
        self._announce(prompt)
        if (received := self.announced.offer(offer, self.visits[worker_id])) is not None:
            self.pulls.add(self.visits[worker_id], received.sequence, offer)

    def abort(self, name: str, attempt: int) -> None:
        """The router wants no attempt up to that one."""
        self.announced.abort(name, attempt)
        self.pulls.abort(name, attempt)

    def _announce(self, prompt: DecodeSequence) -> None:
        """The router does so once."""
        if self.attempts.get(prompt.request.request_id, -1) < prompt.request.attempt:
            self.attempts[prompt.request.request_id] = prompt.request.attempt
            self.announced.announce(prompt)

    def turn(self) -> list[DecodeSequence]:
        """What a turn of the loop does with handoffs; returns what was activated."""
        arrived = self.pulls.transfers.collect()
        for sequence in arrived:
            self.scheduler.activate(sequence)
        self.start()
        self.pulls.check()
        self.check()
        return arrived

    def start(self) -> None:
        """Begin to pull all that there is room for."""
        while self.pulls.start_next() is not None:
            pass

    def take_failures(self) -> list[tuple[Key, ErrorCode, str]]:
        """What the router was told since the last call."""
        failures, self.failures = self.failures, []
        return failures

    def num_handoffs(self) -> int:
        """Those that wait, are pulled, or are pulled ahead."""
        return len(self.pulls.waiting) + len(self.pulls.transfers.under_way) + len(self.pulls.early.ahead)

    def foreseen(self) -> Counts:
        """Blocks to have at hand for what comes next."""
        return self.pulls.prefixes.foreseen(islice(self.pulls.waiting, self.pulls.max_pulls))

    def check(self) -> None:
        """Each block has an owner."""
        check_owned(
            self.allocator, [*blocks_of_rows(self.scheduler), *blocks_ahead(self.pulls.early.ahead), *self.found()]
        )

    def found(self) -> list[list[int]]:
        """Blocks that are granted to those that wait."""
        return [each.grant.block_ids for each in self.pulls.waiting if each.grant is not None]

    def copied(self) -> list[list[int]]:
        """Source blocks of each copy."""
        return [[source for source, _ in copy.pairs] for copy in self.pool.copies]

    def end_copies(self) -> None:
        for copy in self.pool.copies:
            copy.end()

    def all_free(self) -> bool:
        return self.allocator.num_free == self.allocator.capacity

    def released(self) -> list[str]:
        """Requests whose blocks were given back, one way or the other."""
        return [name for peer in self.peers.values() for what, name in peer.said if what != "accept"]


def num_that_made_way(scheduler: DecodeScheduler) -> int:
    """Blocks for every row's next token, as the loop gets them; how many sequences had to go for that."""
    scheduler.slots.make()
    num_gone = 0
    while scheduler.slots.is_starved(scheduler.lingering):
        scheduler.preempt()
        num_gone += 1
        scheduler.slots.make()
    return num_gone
