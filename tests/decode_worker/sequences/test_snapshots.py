"""Snapshots of states while decoding: the last one is found after the end, with what the state held there."""

from typing import cast

import pytest

from common.kv.tables import tables_of
from common.memory.blocks.answers import Answer
from common.memory.blocks.pool import User
from common.memory.client.lease_cache import LeaseCache
from common.memory.server.pools import Pools
from common.wire.messages.memory import (
    BlocksLeased,
    MemoryMessage,
    OfBlocks,
    PoolShortage,
    PromptBlocks,
    PromptWanted,
)
from common.wire.values.block_key import digests, pack_keys, root_of
from common.wire.values.kv_layout import Counts, KVLayout
from common.wire.values.packing import num_ids, pack_ids
from common.wire.values.pool_shape import PoolShape
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sealing import DISTANCE_TOKENS, Sealing
from decode_worker.sequences.sequence import DecodeSequence, SealedChain
from decode_worker.sequences.snapshots import Snapshots
from tests.memory.parties import Bytes
from tests.support.allocator import check_owned
from tests.support.group_model import GroupMemory
from tests.support.layouts import full, state
from tests.support.sequences import blocks_of_rows, decode_sequence

BLOCK, US, OTHER = 16, 1, 2
LAYOUT = KVLayout("model", (full(1, 1, 1, BLOCK, "float32"), state(3), state(5)))
ROOT = root_of(LAYOUT)


class House:
    """A decode worker with a device that runs a step ahead of the host, and its memory server."""

    def __init__(self) -> None:
        self.shape = PoolShape(LAYOUT, (41, 10, 10))
        self.said, self.pools = list[MemoryMessage](), Pools(Bytes, 0.0, poisons=False)
        for client in (US, OTHER):
            self.pools.want(User(client, (f"w{client}", 1), is_decoding=True), LAYOUT, self.shape.num_blocks)
        self.index = self.pools.of_client[US].index
        self.leases = LeaseCache(self.shape, self.said.append, clock=lambda: 0.0)
        self.scheduler, self.memory = DecodeScheduler(self.leases, 4, 600), GroupMemory(LAYOUT)
        self.sealing = Sealing(self.leases)
        self.snapshots = Snapshots(self.leases, self.sealing, self._copy)
        self.scheduler.on_end = self._end
        self.num_copies = self.num_other = 0

    def _copy(self, source_id: int, target_id: int) -> None:
        group = self.shape.group_of(source_id)
        self.memory.copy(self.memory, group, self._within(source_id), self._within(target_id))
        self.num_copies += 1

    def _within(self, block_id: int) -> int:
        return block_id - self.shape.begins[self.shape.group_of(block_id)]

    def _end(self, sequence: DecodeSequence) -> None:
        self.sealing.seal([sequence])
        self.snapshots.forget(sequence)

    def exchange(self) -> None:
        self.leases.update((4, 0, 0), LAYOUT.nothing)
        while self.said:
            self.hear(self.pools.handle(US, cast(OfBlocks, self.said.pop(0))))

    def hear(self, answers: list[Answer]) -> None:
        for client, message, _ in answers:
            match message:
                case BlocksLeased() if client == US:
                    self.leases.receive(message)
                case PromptBlocks() if client == OTHER:
                    self.num_other += num_ids(message.block_ids)
                case PromptBlocks() if not self.snapshots.receive(message):
                    self.leases.free(self.leases.granted(message).block_ids)
                case PoolShortage() if client == US:
                    self.leases.demand.shortage(is_short=message.is_short)

    def _run(self, sequence: DecodeSequence, position: int) -> None:
        tables = [list(map(self._within, table.block_ids)) for table in sequence.tables]
        self.memory.step(tables, position, position)

    def begin(self, num_tokens: int) -> DecodeSequence:
        """A text whose token at each position is the position, with a prompt of so many."""
        counts: Counts = (num_tokens // BLOCK + 1, 1, 1)
        if not self.leases.fetch(counts):
            self.exchange()
        sequence = decode_sequence("r", list(range(num_tokens + 1)), 1)
        chain = [ROOT, *digests(ROOT, pack_ids(range(num_tokens)), BLOCK)]
        sequence.chain = SealedChain(num_tokens // BLOCK, chain[num_tokens // BLOCK])
        self.scheduler.reserve(sequence, tables_of(LAYOUT, self.leases.allocate(counts)))
        for position in range(num_tokens):
            self._run(sequence, position)
        full_ids = sequence.tables[0].block_ids[: num_tokens // BLOCK]
        if full_ids:
            self.leases.seal(full_ids, chain[1:])
        self.scheduler.activate(sequence)
        return sequence

    def decode(self, sequence: DecodeSequence, num_tokens: int, *, is_end: bool = True) -> None:
        """Until there are so many tokens; a step more is launched, and over after the end."""
        while len(sequence.token_ids) < num_tokens:
            self.exchange()
            self.scheduler.slots.make()
            self.snapshots.take(self.scheduler.rows.sequences)
            assert self.scheduler.launched() == [sequence]
            self._run(sequence, sequence.num_scheduled - 2)
            if sequence.num_in_flight == 2:
                sequence.token_ids.append(len(sequence.token_ids))
                if is_end and len(sequence.token_ids) == num_tokens:
                    self.scheduler.end(sequence)
                self.sealing.seal([sequence])
                self.scheduler.collected([sequence])
        if is_end:
            self.scheduler.collected([sequence])
        self.exchange()
        self.exchange()
        check_owned(self.leases, blocks_of_rows(self.scheduler))

    def num_held(self) -> list[int]:
        """Blocks of states in use or read here."""
        pairs = zip(self.shape.capacity[1:], self.leases.num_unused[1:], strict=True)
        return [count - num_unused for count, num_unused in pairs]

    def num_found(self, num_tokens: int) -> int:
        """Tokens behind which a text that begins alike is resumed; each state has seen these."""
        keys = pack_keys(digests(ROOT, pack_ids(range(num_tokens)), BLOCK))
        found = self.index.sealed.find(keys)
        if found.num_places:
            for group in (1, 2):
                [block_id] = found.found[group].tolist()
                assert self.memory.states[group, self._within(block_id)] == tuple(range(found.num_places * BLOCK))
        return found.num_places * BLOCK


@pytest.mark.parametrize("num_prompt", [40, 48, 64])
@pytest.mark.parametrize("num_tokens", [100, 128, 129, 130, 131, 143, 144, 145, 191, 192, 193, 194, 195, 300])
def test_a_text_goes_on_behind_the_last_snapshot_of_a_reply(num_prompt: int, num_tokens: int) -> None:
    house = House()
    house.decode(house.begin(num_prompt), num_tokens)
    last = (num_tokens - 2) // DISTANCE_TOKENS * DISTANCE_TOKENS
    is_overwritten = (num_tokens - 1) % DISTANCE_TOKENS == 0  # by the step ahead
    is_asked = last - BLOCK >= num_prompt  # a block before
    assert house.num_found(num_tokens) == (last if is_asked and not is_overwritten else 0)


def test_without_free_states_there_are_no_snapshots_and_nobody_waits() -> None:
    house = House()
    sequence = house.begin(40)
    house.index.lease(OTHER, (0, *house.index.num_free[1:]))
    house.decode(sequence, 300)
    assert not house.num_copies and not house.num_found(300) and not house.pools.of_client[US].is_short


def test_while_others_wait_snapshots_are_sealed_and_the_blocks_are_given_up() -> None:
    house = House()
    sequence = house.begin(40)
    house.decode(sequence, 132, is_end=False)
    house.hear(house.pools.handle(OTHER, PromptWanted("other", 0, b"", 0, (40, 0, 0), 0)))
    house.decode(sequence, 134, is_end=False)
    assert house.num_found(134) == 128 and house.num_held() == [1, 1]


def test_others_get_the_blocks_of_snapshots() -> None:
    house = House()
    sequence = house.begin(40)
    house.decode(sequence, 132, is_end=False)
    assert house.num_held() == [2, 2]
    all_others = tuple(count - 1 for count in house.shape.capacity[1:])
    house.hear(house.pools.handle(OTHER, PromptWanted("other", 0, b"", 0, (0, *all_others), 0)))
    assert house.pools.of_client[US].is_short
    house.decode(sequence, 134, is_end=False)
    house.exchange()
    assert house.num_other == sum(all_others) and house.num_held() == [1, 1]
    house.decode(sequence, 200)
    assert house.num_copies == 2 * 2 and not house.num_found(200)


def test_blocks_that_come_after_the_end_are_given_back() -> None:
    house = House()
    sequence = house.begin(47)
    house.snapshots.take([sequence])
    sequence.num_scheduled += 1
    house.snapshots.take([sequence])
    assert house.snapshots.asked
    house.scheduler.end(sequence)
    house.exchange()
    house.exchange()
    check_owned(house.leases, [])
    assert house.index.num_free[1:] == house.shape.capacity[1:]
