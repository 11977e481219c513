"""Workers, peers and the owner of their pool, in any order of messages, deaths and late writes: no block is two's."""

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from itertools import chain, count
from typing import NamedTuple, TypeVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.memory.base.pattern import pattern
from common.memory.blocks.answers import Answer
from common.memory.blocks.index import TIER, BlockIndex
from common.memory.blocks.lease_table import FREE, SEALED, BlockState, Claim
from common.memory.blocks.offers import OFFERS
from common.memory.client.demand import LACKING_S
from common.wire.messages.memory import KVAccepted, KVDeclined, KVOffer, KVReceived, OfBlocks, OfPeers
from common.wire.values.block_key import keys_in_group
from common.wire.values.kv_layout import Counts, KVLayout
from common.wire.values.packing import unpack_ids
from common.wire.values.pool_shape import PoolShape, minus, plus
from tests.memory.parties import MOST_SEALED, NUM_SLOTS, House, Party, Peer, Worker, blocks_in, references_of
from tests.memory.slab_audit import check_slabs
from tests.support.allocator import check_owned
from tests.support.layouts import one_group, state, window

LAYOUT = one_group("model", 1, 1, 1, 128, "float16")  # 512 bytes a block, of which one is worth a restore
BLOCK_BYTES = LAYOUT.groups[0].block_bytes
NUM_BLOCKS = 13
ONE = PoolShape(LAYOUT, (NUM_BLOCKS,))
TWO = PoolShape(KVLayout("model", (LAYOUT.groups[0], window(128, 200))), (NUM_BLOCKS, 8), (4, 3))
THREE = PoolShape(KVLayout("model", (LAYOUT.groups[0], window(128, 200), state(100))), (9, 8, 5), (4, 3, 2))
UNEQUAL = PoolShape(KVLayout("model", (LAYOUT.groups[0], window(1, 3, 2))), (NUM_BLOCKS, 6), (5, 3))  # never used again
MOST_WORKERS, MOST_PEERS = 4, 2
"""Connected at a time."""
FEW = st.integers(0, 9)
Some = TypeVar("Some")


def any_of(some: Sequence[Some], index: int) -> Some:
    return some[index % len(some)]


def blocks_of(offers: list[KVOffer]) -> Counter[int]:
    return Counter(block_id for offer in offers for block_id in unpack_ids(offer.block_ids))


def claims_of(index: BlockIndex) -> list[Claim]:
    """By block; each of the few different claims is asked for once."""
    _, examples, numbers = np.unique(index.leases._codes, return_index=True, return_inverse=True)
    claims = [index.leases.claim(block_id) for block_id in examples.tolist()]
    return [claims[number] for number in numbers.tolist()]


class Ending(Enum):
    """How one goes."""

    KILLED = "its device goes on for a moment"
    LET_GO = "the server ends its connection, and it has not noticed yet"
    IN_ORDER = "perhaps amid something that its device does; what it is sent meanwhile it does not read"
    PROCESS = "the process of one that has gone is over"
    PEER = "by itself, killed, or let go, which it has not noticed yet"
    SERVER = "and the next one comes"


class Handover(NamedTuple):
    """What becomes of an offer."""

    num_sealed: int  # blocks more before it
    arrives: bool
    accepts: bool | None

    @staticmethod
    def any() -> st.SearchStrategy["Handover"]:
        return st.builds(Handover, st.integers(0, MOST_SEALED), st.booleans(), st.none() | st.booleans())


class Machine(RuleBasedStateMachine):
    shape = ONE

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.num_bytes = count(), 0
        self.sealed_bytes: list[int] = []  # of texts that somebody may look for
        self.workers: list[Worker] = []
        self.peers: list[Peer] = []
        self._open()

    def _open(self) -> None:
        """A server, with a worker of each kind and a peer."""
        self.house = House(self.shape)
        for is_decoding in (False, True):
            self.start(is_decoding)
        self.visit()
        self.all_arrives()

    def _byte(self) -> int:
        """Of a text like no other."""
        self.num_bytes += 1
        return self.num_bytes

    def _level(self, count: int) -> Counts:
        return tuple(min(count, most) for most in self.shape.assured)

    def _connected(self) -> list[Party]:
        return [party for party in [*self.workers, *self.peers] if party.is_connected]

    def _members(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.is_connected]

    def _active(self, is_decoding: bool | None = None) -> list[Worker]:
        """Those that do something, whether their server hears of it or not."""
        return [w for w in self.workers if not (w.is_over or w.has_left) and is_decoding in (None, w.is_decoding)]

    def _server_reads(self, party: Party) -> None:
        message = party.said.popleft()
        assert isinstance(message, OfBlocks) and (isinstance(party, Worker) or isinstance(message, OfPeers))
        answers = self.house.pools.handle(party.client, message)
        if isinstance(message, KVReceived | KVAccepted):
            self.house.received.add(message.request_id)
        if isinstance(message, KVOffer):
            taker = next((p for p in self._connected() if p.user.worker[0] == message.decode_worker_id), None)
            assert (answers[0] == Answer(party.client, KVDeclined(message.request_id, 0))) == (taker is None)
        self._answer(answers)

    def _answer(self, answers: list[Answer]) -> None:
        by_client = {party.client: party for party in self._connected()}
        for answer in answers:
            by_client[answer.client].heard.append(answer.message)

    def _end_connection(self, party: Party, num_unread: int) -> None:
        """What it has said is read first, but for what was not sent yet."""
        while len(party.said) > num_unread:
            self._server_reads(party)
        party.is_connected = False
        self._answer(self.house.pools.leave(party.client))

    # --- messages -----------------------------------------------------------------------------------

    @rule(index=FEW, to_server=st.booleans(), num_messages=st.integers(1, 4))
    def messages_arrive(self, index: int, to_server: bool, num_messages: int) -> None:
        """At a party that is no more connected arrives what was on its way."""
        parties: list[Party] = [*self._active(), *self.peers]
        if to_server:
            parties = [party for party in parties if party.is_connected]
        if parties:
            party = any_of(parties, index)
            for _ in range(min(num_messages, len(party.said if to_server else party.heard))):
                self._server_reads(party) if to_server else party.hear()

    @rule()
    def all_arrives(self) -> None:
        while any(party.said or party.heard for party in self._connected()):
            for party in self._connected():
                while party.said:
                    self._server_reads(party)
                while party.heard:
                    party.hear()

    # --- what workers do ----------------------------------------------------------------------------

    @precondition(lambda self: len(self._members()) < MOST_WORKERS)
    @rule(is_decoding=st.booleans())
    def start(self, is_decoding: bool) -> None:
        worker = Worker(next(self.numbers), self.house, is_decoding=is_decoding)
        self.workers.append(worker)
        self._answer(self.house.pools.want(worker.user, self.shape.layout, self.shape.num_blocks, self.shape.floor))
        worker.leases.update(self._level(2), self.shape.layout.nothing)

    @rule(index=FEW, numbers=st.tuples(*[st.integers(0, NUM_BLOCKS)] * 3), asks=st.booleans())
    def begin(self, index: int, numbers: Counts, asks: bool) -> None:
        """With what is at hand, or what is asked for and may be there when it is asked for again."""
        worker = any_of(self._active(), index)
        counts = tuple(map(min, numbers, self.shape.assured if asks else worker.leases.num_free))
        if any(counts) and worker.leases.fetch(counts):
            worker.begin(self._byte(), counts)

    @rule(index=FEW)
    def write(self, index: int) -> None:
        """Also what the device of one that is gone has not done yet."""
        any_of([worker for worker in self.workers if not worker.is_over], index).write()

    @rule(index=FEW)
    def end(self, index: int) -> None:
        if workers := [worker for worker in self._active() if worker.texts]:
            any_of(workers, index).end()

    @rule(index=FEW, to=FEW, is_to_peer=st.booleans(), how=Handover.any())
    def hand_over(self, index: int, to: int, is_to_peer: bool, how: "Handover") -> None:
        """To any decode worker that there ever was."""
        decoding = [worker for worker in self.workers if worker.is_decoding]
        takers: list[Party] = [*self.peers] if is_to_peer and self.peers else [*decoding]
        if not (takers and (givers := self._active(False))):
            return
        giver, taker = any_of(givers, index), any_of(takers[::-1], to)
        if how.arrives:  # blocks, if there are any
            giver.leases.update(self._level(1), self.shape.layout.nothing)
            self.all_arrives()
        if not giver.texts and any(giver.leases.num_free):
            giver.begin(self._byte(), tuple(min(2, count) for count in giver.leases.num_free))
        if not giver.texts:
            return
        giver.write()
        if self.shape.layout.is_reusable:
            self.sealed_bytes += giver.seal(how.num_sealed)
        giver.hand_over(taker.user.worker[0])
        if how.arrives:
            self.all_arrives()
        if how.accepts is not None:
            self._take_over(taker, how.accepts)

    @rule(index=FEW, accepts=st.booleans())
    def take_over(self, index: int, accepts: bool) -> None:
        """Of those that have gone only some that have not noticed; what was on its way to them they hear."""
        parties: list[Party] = [*self._active(True), *self.peers]
        if takers := [party for party in parties if party.has_offers]:
            self._take_over(any_of(takers, index), accepts)

    @rule(index=FEW, arrives=st.booleans())
    def receive(self, index: int, arrives: bool) -> None:
        """Own a request whose blocks are accepted or declined later."""
        parties: list[Party] = [*self._active(True), *self.peers]
        if takers := [party for party in parties if party.offered]:
            taker = any_of(takers, index)
            taker.receive(taker.offered[-1])
            if arrives:
                self.all_arrives()

    def _take_over(self, taker: Party, accepts: bool) -> None:
        if taker in self.peers or taker in self._active():
            while taker.heard:
                taker.hear()
            if taker.offered:
                offer = taker.offered.pop(0)
                taker.accept(offer) if accepts else taker.decline(offer)

    @rule(index=FEW, level=st.integers(0, 4), arrives=st.booleans())
    def tend(self, index: int, level: int, arrives: bool) -> None:
        worker = any_of(self._active(), index)
        floor = len(worker.texts) if worker.is_decoding else 0
        worker.leases.update(self._level(level), self._level(floor))
        if arrives:
            self.all_arrives()

    @precondition(lambda self: self.shape.layout.is_reusable)
    @rule(index=FEW, count=st.integers(1, MOST_SEALED), arrives=st.booleans(), ends=st.booleans())
    def seal(self, index: int, count: int, arrives: bool, ends: bool) -> None:
        """Blocks of what was written, which may be over with that."""
        if workers := [worker for worker in self._active() if worker.texts]:
            worker = any_of(workers, index)
            worker.write()
            self.sealed_bytes += worker.seal(count)
            if ends:
                worker.end()
                worker.leases.update(self._level(1), self.shape.layout.nothing)
            if arrives:
                self.all_arrives()

    @precondition(lambda self: self.sealed_bytes)
    @rule(index=FEW, whose=FEW, is_peer=st.booleans(), arrives=st.booleans())
    def look_for(self, index: int, whose: int, is_peer: bool, arrives: bool) -> None:
        """A text that begins as another one, which may be over."""
        peers = [peer for peer in self.peers if peer.is_connected]
        lookers: list[Worker | Peer] = [*peers] if is_peer and peers else [*self._active()]
        any_of(lookers, index).look_for(any_of(self.sealed_bytes[::-1], whose))
        if arrives:
            self.all_arrives()

    @precondition(lambda self: self.house.copies.begun)
    @rule(numbers=st.lists(st.integers(0, 1), max_size=4))
    def copies_end(self, numbers: list[int]) -> None:
        """Between the pool and host memory, some of those that were begun."""
        for number in numbers:
            self.house.copies.end(number)
            self._answer(self.house.pools.update())

    @property
    def _gone(self) -> list[int]:
        """Bytes of texts that are in host memory only."""
        keys = self.house.tier.slots.slot_of.keys() - self.house.index.sealed.block_of.keys()
        return sorted({key[0] for key in keys})

    @precondition(lambda self: self._gone)
    @rule(index=FEW, whose=FEW, first=st.integers(0, MOST_SEALED - 1), again=st.booleans())
    def look_for_what_is_gone(self, index: int, whose: int, first: int, again: bool) -> None:
        """Perhaps two do, one of them from amid the text on."""
        byte = any_of(self._gone, whose)
        for number in range(1 + again):
            any_of(self._active(), index + number).look_for(byte, 0 if number else first)

    @precondition(lambda self: self.sealed_bytes)
    @rule(index=FEW, num_left=st.integers(0, 3), is_copied=st.booleans())
    def crowd_out(self, index: int, num_left: int, is_copied: bool) -> None:
        """Whoever gets all that is free, but some, leaves little of texts that are over beside what was copied."""
        self.all_arrives()
        for _ in range(3 if is_copied else 0):
            self._answer(self.house.pools.update())
            self.house.copies.finish()
        if decoding := [worker for worker in self._members() if worker.is_decoding and not worker.has_left]:
            worker = any_of(decoding, index)
            num_wanted = minus(self.house.index.num_free, tuple(num_left for _ in self.shape.num_blocks))
            worker.leases.fetch(plus(num_wanted, worker.leases.num_free))
            for _ in range(2):  # asked for, and given back as it was not used
                worker.leases.update(self._level(1), self.shape.layout.nothing)
                self.all_arrives()
                worker.now_s += 2 * LACKING_S

    @rule()
    def server_turns(self) -> None:
        """Blocks go to host memory, and come from there, as they were sealed or asked for."""
        self._answer(self.house.pools.update())

    # --- what peers do -----------------------------------------------------------------------------

    @precondition(lambda self: sum(peer.is_connected for peer in self.peers) < MOST_PEERS)
    @rule()
    def visit(self) -> None:
        peer = Peer(next(self.numbers), self.house)
        assert not self.house.pools.visit(peer.user, self.house.pool_id + 1), "that is another's pool"
        self.peers.append(peer)
        self._answer(self.house.pools.visit(peer.user, self.house.pool_id))

    @rule(index=FEW, num_blocks=st.integers(1, NUM_BLOCKS))
    def copy(self, index: int, num_blocks: int) -> None:
        """What is over then counts, if the connection stands."""
        if peers := [peer for peer in self.peers if peer.pulls]:
            any_of(peers, index).copy(num_blocks)

    @rule(index=FEW, whose=FEW)
    def pull_ahead(self, index: int, whose: int) -> None:
        if self.peers and (workers := [worker for worker in self._active(False) if worker.texts]):
            peer, worker = any_of(self.peers, index), any_of(workers, whose)
            if worker.house is peer.house:
                peer.pull_ahead(worker)

    # --- who goes -----------------------------------------------------------------------------------

    @rule(how=st.sampled_from(Ending), index=FEW, num_unread=st.integers(0, 3))
    def one_goes(self, how: Ending, index: int, num_unread: int) -> None:
        """All endings are one rule of many, as otherwise nobody lives to see much."""
        match how:
            case Ending.PEER if peers := [peer for peer in self.peers if peer.is_connected]:
                self._lose_peer(any_of(peers, index), num_unread)
            case Ending.PROCESS if gone := [worker for worker in self.workers if worker.may_end]:
                self._bury(any_of(gone, index))
            case Ending.SERVER if index == 0 and len(self.workers) < 12:
                self._restart()
            case Ending.KILLED | Ending.LET_GO | Ending.IN_ORDER if len(self._members()) > 1:
                worker = any_of(self._members(), index)
                if how is Ending.IN_ORDER:
                    worker.part()
                self._end_connection(worker, 0 if how is Ending.IN_ORDER else num_unread)
                worker.has_left = how is not Ending.LET_GO
                num_kept = self.house.pools.num_quarantined(worker.client)
                assert how is not Ending.IN_ORDER or num_kept == len(worker.writable), "nothing else is kept"

    def _lose_peer(self, peer: Peer, num_unread: int) -> None:
        self._end_connection(peer, num_unread)
        index = self.house.index
        has_some = any(claim.client == peer.client for claim in claims_of(index)) or index.leases.holds(peer.client)
        assert not has_some, "it only reads, so that nobody waits for its process"

    def _bury(self, worker: Worker) -> None:
        worker.is_over = True
        if worker.house is self.house:
            self._answer(self.house.pools.reclaim(worker.client))

    def _restart(self) -> None:
        """None of those that are there is connected to the next server."""
        for party in self._connected():
            party.is_connected = False
        self._open()

    # --- what always holds --------------------------------------------------------------------------

    @invariant()
    def what_one_may_write_nobody_else_has(self) -> None:
        for house in {worker.house for worker in self.workers}:
            of_house = [worker for worker in self.workers if worker.house is house and not worker.is_over]
            writers = Counter(chain.from_iterable(worker.writable for worker in of_house))
            assert not writers or max(writers.values()) == 1, writers
            read = {b for peer in self.peers if peer.is_connected and peer.house is house for b in peer.readable}
            assert not read & writers.keys(), "a block is written while it is read"
        for worker in self.workers:
            if not (worker.is_connected or worker.is_over) and worker.house is self.house:
                assert worker.writable <= worker.blocks(BlockState.QUARANTINED)

    @invariant()
    def what_comes_back_is_nobody_s_before_it_is_there(self) -> None:
        index, written = self.house.index, self.house.copies.written
        for block_id in range(1, self.shape.num_blocks[0]):
            if self.shape.place(block_id).offset in written:
                assert index.leases.claim(block_id) == (BlockState.LEASED, TIER)

    @invariant()
    def host_memory_holds_what_its_keys_say(self) -> None:
        tier = self.house.tier
        slots, served = tier.slots, tier.served
        assert (served is not None) == self.shape.layout.is_reusable
        for first in slots.slot_of.values():
            key, [byte] = slots._key[first].tobytes(), {self._in_slot(slot) for slot in slots.all_of(first)}
            assert byte in {keys_in_group(key, number)[0] for number in range(len(self.shape.num_blocks))}, "another's"
        if served is not None:
            leaving = [slot for spill in served.spills.under_way for of_block in spill.slots for slot in of_block]
            kept = [slot for first in slots.slot_of.values() for slot in slots.all_of(first)]
            all_of_them = [*kept, *slots.free, *leaving]
            assert sorted(all_of_them) == list(range(slots.num_slots)), "each is somewhere, once"
            read = Counter(chain.from_iterable(restore.slots.tolist() for restore in served.restores.restores))
            assert sum(read.values()) + len(slots._unread) == len(slots.slot_of) and max(read.values(), default=1) == 1

    def _in_slot(self, slot: int) -> int:
        """The first byte of a slot."""
        tier = self.house.tier
        number, index = divmod(slot, tier._num_in_piece)
        return int(tier.room.pieces[number].content[index * tier.traffic.slot_bytes])

    @invariant()
    def what_was_written_stays(self) -> None:
        """In what is a worker's, and what is offered, and was not accepted, which may not have been read yet."""
        said = chain.from_iterable(party.said for party in self._connected())
        accepted = {message.request_id for message in said if isinstance(message, KVAccepted)}
        for worker in self.workers:
            for text in worker.texts if not worker.is_over else ():
                there = text.block_ids if text.is_written else text.sealed
                assert all(worker.house.holds(i, text.byte) for i in there)
        for key, offered in self.house.index.offers.items():
            byte, block_ids = self.house.bytes_offered[key.request_id], blocks_in(offered)
            assert key.request_id in accepted or all(self.house.holds(i, byte) for i in block_ids)

    @invariant()
    def all_believe_the_same(self) -> None:
        """The server and those that are connected, but for what is on its way."""
        for worker in self._members():
            leased, read, offered = worker.expected()
            assert (worker.writable, worker.readable, blocks_of(worker.offered)) == (leased, read, offered)
            check_owned(worker.leases, [text.block_ids for text in worker.texts])
            assert worker.is_decoding or worker.owned == self._unanswered(worker)
        for peer in self.peers:
            if peer.is_connected:
                leased, read, offered = peer.expected()
                assert (peer.readable, blocks_of(peer.offered)) == (leased | set(read), offered)

    def _unanswered(self, worker: Worker) -> set[str]:
        """Requests that a worker has offered: on their way, with the server, or answered, and that is on its way."""
        on_the_way = chain(worker.said, worker.heard)
        at_server = {key.request_id for key, client in self.house.pool.senders.items() if client == worker.client}
        return at_server | {m.request_id for m in on_the_way if isinstance(m, KVOffer | KVReceived | KVDeclined)}

    @invariant()
    def what_the_server_waits_for_is_offered(self) -> None:
        connected = {party.client for party in self._connected()}
        assert self.house.pool.senders.keys() <= self.house.index.offers.keys()
        assert {*self.house.pool.senders.values()} <= connected

    @invariant()
    def every_block_is_somewhere_once(self) -> None:
        index, proof_ids = self.house.index, self.shape.proof_ids
        claims = claims_of(index)
        states = Counter(claim.state for claim in claims)
        check_slabs(index)
        assert states[BlockState.LEASED] == index.leases.num_leased.total()
        assert states[BlockState.OFFERED] == sum(len(leased) for leased, _ in index.offers.values())
        assert states[BlockState.QUARANTINED] == index.num_quarantined.total()
        sealed = index.sealed
        cached = [i for of_group in sealed.cached for i in of_group.block_ids.tolist()]
        readings = sum((Counter(references_of(sealed, client)) for client in sealed.readers.of_client), Counter[int]())
        offered = sum((blocks_in(of_text) for of_text in index.offers.values()), Counter[int]())
        leased = Counter(i for i, claim in enumerate(claims) if claim.state is BlockState.OFFERED)
        assert offered - leased == references_of(sealed, OFFERS), "what is offered is read, and nothing else"
        assert {i: count for i, count in enumerate(sealed.readers.num_references) if count} == readings
        assert {
            client: Counter(references_of(sealed, client)).total() for client in sealed.readers.of_client
        } == sealed.readers.num_of_client
        assert len(cached) == sum(sealed.num_cached) == len(set(cached)) and not readings.keys() & set(cached)
        assert {i for i, claim in enumerate(claims) if claim == SEALED} == readings.keys() | set(cached)
        found = {i: sealed.key[i].tobytes() for i in np.flatnonzero(sealed.is_found).tolist()}
        assert set(cached) <= found.keys() <= readings.keys() | set(cached)
        assert {block_id: key for key, block_id in sealed.block_of.items()} == found
        for proof_id in proof_ids:
            assert claims[proof_id] == FREE
            size = self.shape.place(proof_id).num_bytes
            assert self.house.block(proof_id) == pattern(self.house.pool_id, proof_id, size)

    def teardown(self) -> None:
        """Who is left can have the whole pool in the end, whatever the others did."""
        for worker in self.workers:
            if not worker.is_connected and worker.house is self.house:
                self._answer(self.house.pools.reclaim(worker.client))
        last = self._members()[0]
        for turn in range(40):
            self.house.copies.finish()
            self._answer(self.house.pools.update())
            self.all_arrives()
            for party in self._connected():
                party.let_everything_go()
            if turn > 8 and last.leases.fetch(self.shape.assured):
                assert not any(worker.owned for worker in self._members()), "its owner was never told"
                return
            for worker in self._members():
                worker.now_s += LACKING_S / 2
                worker.leases.update(self._level(2), self.shape.layout.nothing)
        raise AssertionError(f"{last.leases.num_free} of {self.shape.assured} blocks at hand in the end")


class MachineOfTwo(Machine):
    shape = TWO


class MachineOfThree(Machine):
    shape = THREE


class MachineOfUnequal(Machine):
    shape = UNEQUAL


class MachineOfTier(Machine):
    """Begins with texts that are in host memory, and of which the pool has a part at most."""

    def _open(self) -> None:
        super()._open()
        worker = self._active(False)[-1]
        for _ in range(2):
            worker.leases.fetch((3,))
            worker.leases.update((3,), (0,))
            self.all_arrives()
            worker.begin(self._byte(), (3,))
            worker.write()
            self.sealed_bytes += worker.seal(3)
            worker.end()
            worker.leases.update((0,), (0,))
            self.crowd_out(0, 2, True)
        assert len(self.house.tier.slots) == NUM_SLOTS and self._gone


for machine in (Machine, MachineOfTier, MachineOfTwo, MachineOfThree, MachineOfUnequal):
    machine.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
test_no_block_is_ever_two_parties = pytest.mark.medium(Machine.TestCase)
test_no_block_is_two_parties_on_its_way_to_and_from_host_memory = pytest.mark.slow(MachineOfTier.TestCase)
test_no_block_of_two_groups_is_ever_two_parties = pytest.mark.slow(MachineOfTwo.TestCase)
test_no_block_of_three_groups_is_ever_two_parties = pytest.mark.slow(MachineOfThree.TestCase)
test_no_block_of_groups_with_unequal_blocks_is_ever_two_parties = pytest.mark.slow(MachineOfUnequal.TestCase)
