"""Prompts of several groups change hands in one pool, while blocks are short and workers die: every text is right.

Real schedulers, leases and pools; messages take their time, and what a dead worker's device does late is garbage.
"""

import random
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.kv.tables import Tables
from common.memory.blocks.answers import Answer
from common.memory.blocks.pool import User
from common.memory.client.client import MemoryClient, PoolClaim
from common.memory.client.shared_pool import SharedPool
from common.memory.server.pools import Pools
from common.memory.server.report import groups, usage
from common.settings.config import PrefillSection
from common.wire.messages.memory import (
    BlocksFreed,
    BlocksWanted,
    KVAccepted,
    KVDeclined,
    KVOffer,
    KVReceived,
    MemoryKnock,
    MemoryMessage,
    PoolRegion,
    PoolShortage,
)
from common.wire.values.kv_layout import CacheKind, KVLayout
from common.wire.values.pool_shape import PoolShape, plus
from common.wire.values.sampling_params import SamplingParams
from decode_worker.arrivals.offers import Offers
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sealing import Sealing
from decode_worker.sequences.sequence import DecodeSequence
from prefill_worker.sequence import PrefillSequence
from tests.memory.slab_audit import check_slabs
from tests.support.allocator import check_owned
from tests.support.group_model import LAYOUTS, GroupMemory, next_token
from tests.support.layouts import no_prefixes
from tests.support.sequences import (
    blocks_of_prompts,
    blocks_of_rows,
    decode_sequence,
    prompt_scheduler,
    prompt_sequence,
    taken,
)

BUDGET, MAX_LEN, MAX_ROWS, MAX_TOKENS = 16, 60, 3, 30
TURN_S = 0.05


class Memory:
    """Of a pool; a block that comes free holds nothing any more."""

    handle, address, descriptor = b"", 0, None

    def __init__(self, shape: PoolShape) -> None:
        self.num_bytes, self.shape, self.content = shape.num_bytes, shape, GroupMemory(shape.layout)

    def write(self, offset: int, data: bytes | bytearray) -> None: ...
    def seal(self) -> None: ...
    def close(self) -> None: ...

    def fill(self, offset: int, num_bytes: int, byte: int) -> None:
        """Empty all blocks that lie there, whatever their group."""
        for number, group in enumerate(self.shape.layout.groups):
            for block in range(offset // group.block_bytes, -(-(offset + num_bytes) // group.block_bytes)):
                self.content.states.pop((number, block), None)
                for at in range(group.block_size):
                    self.content.slots.pop((number, block, at), None)

    def spoil(self, block_ids: Iterable[int]) -> None:
        """What a device does late."""
        for number, blocks in enumerate(self.shape.within_groups([*block_ids])):
            for block in blocks:
                self.content.states[number, block] = (-1,)
                for at in range(self.shape.layout.groups[number].block_size):
                    self.content.slots[number, block, at] = (-1, -1)


class Server:
    """The pool and the ways to it."""

    def __init__(self, layout: KVLayout, rng: random.Random) -> None:
        self.rng, self.now_s = rng, 0.0
        most = layout.most_blocks(MAX_LEN, BUDGET)
        self.shape = PoolShape.lending(layout, tuple(max(4, count * 5 // 2) for count in most), MAX_LEN, BUDGET)
        self.memory = Memory(self.shape)
        self.pools = Pools(lambda num_bytes: self.memory, 0.1, poisons=True)
        self.workers: list[Worker] = []
        self.prompts: dict[str, PrefillSequence] = {}  # as the router has told the workers of them

    def answer(self, answers: list[Answer]) -> None:
        for answer in answers:
            self.workers[answer.client].heard.append(answer.message)

    def read(self, worker: "Worker") -> None:
        match worker.said.popleft():
            case BlocksWanted() | BlocksFreed() | KVOffer() | KVReceived() | KVAccepted() | KVDeclined() as message:
                self.answer(self.pools.handle(worker.client, message))
            case MemoryKnock() as knock:
                worker.heard.append(knock)


class Worker:
    """A part in the pool; `step` is in its kinds."""

    is_decoding = False

    def __init__(self, server: Server) -> None:
        self.server, self.client = server, len(server.workers)
        self.said, self.heard = deque[MemoryMessage](), deque[Any]()
        server.workers.append(self)
        user, shape = User(self.client, (f"w{self.client}", 1), self.is_decoding), server.shape
        answer, *others = server.pools.want(user, shape.layout, shape.num_blocks, shape.floor)
        server.answer(others)
        assert isinstance(answer.message, PoolRegion)
        client = SimpleNamespace(
            connection=SimpleNamespace(send=self.said.append, ask_s=1.0, max_unanswered=10), receive=self._arrived
        )
        claim = PoolClaim(b"", None, 0, answer.message.pool_id, server.shape)
        self.shared = SharedPool(cast(MemoryClient, client), claim, clock=lambda: server.now_s)

    def _arrived(self, *kinds: type[Any]) -> list[Any]:
        arrived = [self.heard.popleft() for _ in range(self.server.rng.randint(0, len(self.heard)))]
        return [message for message in arrived if isinstance(message, kinds)]

    def tables(self, tables: Tables) -> Sequence[list[int]]:
        """As the device is told."""
        begins = zip(tables, self.server.shape.begins, strict=True)
        return [[block_id - begin for block_id in table.block_ids] for table, begin in begins]

    def step(self) -> None:
        raise NotImplementedError

    def blocks(self) -> list[Sequence[int]]:
        raise NotImplementedError


class Prefill(Worker):
    def __init__(self, server: Server) -> None:
        super().__init__(server)
        section = PrefillSection(max_batch_tokens=BUDGET).on("cpu")
        leases = self.shared.leases
        self.scheduler = prompt_scheduler(section, leases, MAX_LEN, no_prefixes(leases))
        self.offered: set[str] = set()  # requests of which no answer has come

    def step(self) -> None:
        for said in self.shared.receive():
            assert isinstance(said, KVReceived | KVDeclined)
            self.offered.remove(said.request_id)
        chunks = self.scheduler.schedule()
        self.scheduler.launched(chunks)
        for chunk in chunks:
            sequence, token = chunk.sequence, -1
            end = sequence.num_scheduled_tokens
            for position in range(end - chunk.num_tokens, end):
                tables = self.tables(sequence.tables)
                token = self.server.memory.content.step(tables, position, sequence.token_ids[position])
            self.scheduler.collected([sequence])
            if not sequence.num_left:
                target = sequence.request.decode_worker_id, sequence.request.decode_epoch
                self.shared.offer(target, sequence.key, token, taken(self.scheduler, sequence))
                self.offered.add(sequence.request.request_id)
        self.shared.update(tuple(1 for _ in self.scheduler.layout.groups), self.scheduler.layout.nothing)

    def blocks(self) -> list[Sequence[int]]:
        return blocks_of_prompts(self.scheduler)


class Decode(Worker):
    is_decoding = True

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.scheduler = DecodeScheduler(self.shared.leases, MAX_ROWS, MAX_LEN)
        self.offers = Offers(self.shared, self.scheduler, Sealing(self.shared.leases), lambda *_: None)
        self.over: list[DecodeSequence] = []
        self.num_preempted = 0

    def step(self) -> None:
        for said in self.shared.receive():
            assert isinstance(said, KVOffer)
            prompt = self.server.prompts[said.request_id]
            sequence = decode_sequence(said.request_id, [*prompt.token_ids], 0, prompt.sampling)
            sequence.handed_over(said.token_id)
            self.shared.receive_offer(said)
            self.offers.add(sequence, said)
        while (accepted := self.offers.start_next()) is not None:
            self.scheduler.activate(accepted)
        self.scheduler.slots.make()
        while self.scheduler.slots.is_starved(self.scheduler.lingering) and not self.offers.release_blocks():
            self.over.append(self.scheduler.preempt())
            self.num_preempted += 1
            self.scheduler.slots.make()
        sequences = self.scheduler.launched()
        for sequence in sequences:
            tables, position = self.tables(sequence.tables), len(sequence.token_ids) - 1
            token = self.server.memory.content.step(tables, position, sequence.token_ids[-1])
            sequence.token_ids.append(token)
            sequence.num_outputs += 1
            if sequence.num_outputs == sequence.sampling.max_tokens:
                self.over.append(sequence)
                self.scheduler.end(sequence)
        self.scheduler.collected(sequences)
        self.offers.lease_blocks(self.scheduler.layout.nothing)

    def blocks(self) -> list[Sequence[int]]:
        return blocks_of_rows(self.scheduler)


class Fleet:
    """Two prefill and two decode workers, each in its turn started again."""

    def __init__(self, layout: KVLayout, rng: random.Random) -> None:
        self.rng, self.server = rng, Server(layout, rng)
        self.prefills, self.decodes = [Prefill(self.server) for _ in range(2)], [Decode(self.server) for _ in range(2)]
        self.dying: list[tuple[Worker, list[int]]] = []
        self.everybody: list[Decode] = [*self.decodes]

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefills, *self.decodes]

    def ask(self, number: int) -> None:
        prompt = [self.rng.randrange(1000) for _ in range(self.rng.randint(1, 28))]
        sampling = SamplingParams(max_tokens=self.rng.randint(2, MAX_TOKENS))
        target = f"w{self.rng.choice(self.decodes).client}"
        sequence = prompt_sequence(f"r{number}", prompt, sampling=sampling, decode_worker_id=target, turn=number)
        self.server.prompts[sequence.request.request_id] = sequence
        self.rng.choice(self.prefills).scheduler.add(sequence)

    def turn(self) -> None:
        self.server.now_s += TURN_S
        for worker in self.rng.sample(self.workers, len(self.workers)):
            for _ in range(self.rng.randint(0, len(worker.said))):
                self.server.read(worker)
            worker.step()
            check_owned(worker.shared.leases, worker.blocks())
        check_slabs(self.server.pools.pools[self.server.shape.layout].index)
        for _, block_ids in self.dying:
            self.server.memory.spoil(block_ids)
        if self.dying and self.rng.random() < 0.1:
            worker, _ = self.dying.pop(0)
            self.server.answer(self.server.pools.reclaim(worker.client))

    def kill(self) -> None:
        """What it has said is heard, and its device goes on for a while."""
        dead = self.rng.choice(self.workers)
        while dead.said:
            self.server.read(dead)
        self.server.answer(self.server.pools.leave(dead.client))
        self.dying.append((dead, list(chain.from_iterable(dead.blocks()))))
        if isinstance(dead, Prefill):
            self.prefills[self.prefills.index(dead)] = Prefill(self.server)
        elif isinstance(dead, Decode):
            self.decodes[self.decodes.index(dead)] = Decode(self.server)
            self.everybody = [*self.everybody, *self.decodes]

    def hear_all(self) -> None:
        """Nobody has anything more to say."""
        while any(worker.said or worker.heard for worker in self.workers):
            for worker in self.workers:
                while worker.said:
                    self.server.read(worker)
                worker.shared.receive()

    def is_idle(self) -> bool:
        is_computed = any(worker.scheduler.prompts or worker.offered for worker in self.prefills)
        is_decoded = any(
            worker.scheduler.active or worker.scheduler.lingering or worker.offers.waiting for worker in self.decodes
        )
        is_on_its_way = usage(self.server.pools).num_offered or any(
            isinstance(message, KVOffer) for worker in self.workers for message in worker.said
        )
        return not (is_computed or is_decoded or is_on_its_way or self.dying)


@pytest.mark.medium
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("seed", range(8))
def test_whoever_dies_and_whatever_is_short_texts_are_right_and_every_block_comes_back(
    layout: KVLayout, seed: int
) -> None:
    rng = random.Random(seed)
    fleet = Fleet(layout, rng)
    for number in range(60):
        fleet.ask(number)
        for _ in range(rng.randint(0, 9)):
            fleet.turn()
        if rng.random() < 0.08:
            fleet.kill()
    for _ in range(4000):
        if fleet.is_idle():
            break
        fleet.turn()
    assert fleet.is_idle(), "somebody waits for ever"
    fleet.hear_all()
    texts = [sequence for worker in {*fleet.everybody} for sequence in worker.over]
    assert len(texts) > 20
    for sequence in texts:
        ids = sequence.token_ids
        assert all(
            ids[position] == next_token(layout, ids[:position])
            for position in range(len(ids) - sequence.num_outputs, len(ids))
        )
    used, held = usage(fleet.server.pools), layout.nothing
    assert (used.num_offered, used.num_quarantined) == (0, 0), "somebody hangs"
    for worker in fleet.workers:
        assert not any(worker.blocks())
        held = plus(held, worker.shared.leases.num_free)
    assert used.num_free + layout.in_main(held) == used.num_blocks


def test_nobody_keeps_blocks_of_one_group_while_it_waits_for_those_of_another() -> None:
    """Each of two has all that there is of one group, at hand, and wants some of both."""
    server = Server(LAYOUTS["windowed"], random.Random(0))
    workers = first, second = Prefill(server), Prefill(server)
    capacity, nothing = server.shape.assured, server.shape.layout.nothing

    def turn() -> None:
        server.now_s += TURN_S
        for worker in workers:
            worker.shared.leases.update(nothing, nothing)
            while worker.said:
                server.read(worker)
        for worker in workers:
            while worker.heard:
                worker.shared.receive()

    for worker, counts in ((first, (capacity[0], 0)), (second, (0, capacity[1]))):
        assert not worker.shared.leases.fetch(counts)
        turn()
        assert worker.shared.leases.num_free == counts
    wanted = (capacity[0] // 2 + 1, capacity[1] // 2 + 1)
    had = []
    for _ in range(40):
        for worker in workers:
            if worker not in had and worker.shared.leases.fetch(wanted):
                worker.shared.leases.free(chain.from_iterable(worker.shared.leases.allocate(wanted)))
                had.append(worker)
        turn()
    assert len(had) == 2


def test_who_waits_for_one_group_holds_up_nobody_who_wants_another() -> None:
    server = Server(LAYOUTS["windowed"], random.Random(0))
    pools, shape = server.pools, server.shape
    workers = [Prefill(server) for _ in range(3)]
    pools.handle(0, BlocksWanted((shape.capacity[0], 0)))
    waits = pools.handle(1, BlocksWanted((1, 1)))
    assert {type(answer.message) for answer in waits} == {PoolShortage} and len(waits) == len(workers)
    [leased] = pools.handle(2, BlocksWanted((0, shape.assured[1] - 1)))
    assert leased.client == 2, "what is left of it is enough for who came before"
    assert pools.handle(2, BlocksWanted((0, 1))) == [], "and that is his"


def test_a_server_tells_what_each_group_uses_and_has() -> None:
    server = Server(LAYOUTS["windowed"], random.Random(0))
    Prefill(server)
    slabs = server.shape.slabs
    server.pools.handle(0, BlocksWanted((2 * slabs.num_in_each[0], 1)))
    full, window = groups(server.pools)
    assert (full.kind, full.num_used_blocks) == (CacheKind.FULL, 2 * slabs.num_in_each[0])
    assert (window.kind, window.num_used_blocks) == (CacheKind.WINDOW, 1)
    assert (full.num_bytes, window.num_bytes) == (3 * slabs.slab_bytes, slabs.slab_bytes), "a proof block is in each"
