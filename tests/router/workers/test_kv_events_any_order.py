"""Blocks sealed, evicted and restored, messages lost, all started again: once it is quiet all is known."""

from collections import deque
from collections.abc import Sequence
from enum import Enum
from itertools import count
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.memory.blocks import event_log
from common.memory.blocks.answers import Answer
from common.memory.blocks.pool import User
from common.memory.server.pools import Pools
from common.wire.messages.memory import (
    BlocksFreed,
    BlocksLeased,
    BlocksSealed,
    BlocksWanted,
    PromptBlocks,
    PromptWanted,
)
from common.wire.messages.memory_reports import KVEvents
from common.wire.messages.worker import KVEventsWanted
from common.wire.values.block_key import unpack_short_keys
from common.wire.values.fields import SHORT_KEY_BYTES
from router.placement.predictions import MOMENT_S, Prediction
from router.workers.kv_events import ASK_S
from tests.memory.parties import Bytes
from tests.memory.tiers import slow_tier
from tests.router.workers.test_kv_events import NET, NUM_BLOCKS, THERE, Rig
from tests.support.layouts import one_group

LAYOUT = one_group("model", 1, 1, 1, 64, "float16")  # two blocks are worth a restore
NUM_SLOTS, BLOCK_US = 8, 2000
MOST_KEYS = 3
"""Of a message here, so that it takes several to tell of all blocks."""
SERVER_ID, WRITER = "memory-0", 0
TEXT = st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True)


def key(number: int) -> bytes:
    return bytes([number]) * 16


def short(numbers: Sequence[int]) -> list[int]:
    return unpack_short_keys(b"".join(key(number)[:SHORT_KEY_BYTES] for number in numbers)).tolist()


class Misfortune(Enum):
    """What befalls them."""

    FAULT = "what is in the pool may be damaged"
    POOL = "all workers leave, and the next ones have another pool, with what is in host memory"
    COPY = "a copy fails, and with it host memory"
    SILENCE = "nothing arrives for long"
    DEAF = "the server has not heard of the router for long"
    LOST = "the router has taken the server for lost"
    SERVER = "it starts again, and with it its workers"
    ROUTER = "it starts again; what was on its way to the last one may get to the next"


class Machine(RuleBasedStateMachine):
    """One memory server with one pool, a router that asks it, and what is on its way between them."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = patch.object(event_log, "MAX_EVENT_KEYS", MOST_KEYS)
        self.patch.start()
        self.epochs = count(1)
        self._start_server()
        self._start_router()
        self.all_is_known_once_it_is_quiet()

    def teardown(self) -> None:
        self.all_is_known_once_it_is_quiet()
        self.patch.stop()

    # --- the server ---------------------------------------------------------------------------------

    def _start_server(self) -> None:
        self.epoch = next(self.epochs)
        self.tier, self.copies = slow_tier(LAYOUT.groups[0].block_bytes, NUM_SLOTS, slots_a_piece=4)
        self.pools = Pools(Bytes, 0.0, poisons=False, tier=self.tier)
        self.events: deque[KVEvents] = deque()  # on their way
        self.asked: deque[KVEventsWanted] = deque()
        self._join()

    def _join(self) -> None:
        """A worker, whose pool is a new one."""
        self.pools.want(User(WRITER, ("w", 1)), LAYOUT, (NUM_BLOCKS,))
        pool, self.is_void = self.pools.of_client[WRITER], False
        self.pool, self.index = (SERVER_ID, pool.pool_id), pool.index

    @rule(numbers=TEXT)
    def seal(self, numbers: list[int]) -> None:
        """Blocks of a text are computed, and evict others if need be; nobody reads them then."""
        for leased in self._leased(len(numbers)):
            keys = b"".join(map(key, numbers))
            self.pools.handle(WRITER, BlocksSealed(leased.block_ids, leased.generations, keys))
            self.pools.handle(WRITER, BlocksFreed(leased.block_ids, leased.generations))

    @rule(num_blocks=st.integers(1, NUM_BLOCKS - 1))
    def evict(self, num_blocks: int) -> None:
        """Somebody wants so many blocks, and gives them back."""
        for leased in self._leased(num_blocks):
            self.pools.handle(WRITER, BlocksFreed(leased.block_ids, leased.generations))

    @rule(numbers=TEXT)
    def look_up(self, numbers: list[int]) -> None:
        """Somebody wants a text, of which some may be in host memory."""
        wanted = PromptWanted("r", 0, b"".join(map(key, numbers)), BLOCK_US, (len(numbers),), 0)
        self._heed(self.pools.handle(WRITER, wanted))

    @rule(numbers=TEXT)
    def park(self, numbers: list[int]) -> None:
        """A text that is in host memory only, as far as there is room."""
        self.seal(numbers)
        self.copy_all()
        self.evict(NUM_BLOCKS - 1)

    @rule(numbers=TEXT)
    def restore(self, numbers: list[int]) -> None:
        self.look_up(numbers)
        self.copy_all()

    @rule()
    def copy_all(self) -> None:
        self.copy(0)
        while self.copies.begun and not self.copies.problem:
            self.copy(0)

    @rule(number=st.integers(0, 1))
    def copy(self, number: int) -> None:
        """One gets on, to host memory or back."""
        self._heed(self.pools.update())
        self.copies.end(number)
        self._heed(self.pools.update())

    def _leased(self, num_blocks: int) -> list[BlocksLeased]:
        """If so many are not being restored."""
        if self.index.num_free < (num_blocks,):
            return []
        answers = self.pools.handle(WRITER, BlocksWanted((num_blocks,)))
        return [answer.message for answer in answers if isinstance(answer.message, BlocksLeased)]

    def _heed(self, answers: list[Answer]) -> None:
        """What was given is let go of."""
        for _, given, _ in answers:
            if isinstance(given, PromptBlocks | BlocksLeased):
                self._heed(self.pools.handle(WRITER, BlocksFreed(given.block_ids, given.generations)))

    @rule(is_beat=st.booleans(), is_lost=st.sampled_from([False, False, True]))
    def tell(self, is_beat: bool, is_lost: bool) -> None:
        log = self.index.sealed.log
        if log.is_on and (is_beat or log.has_news):
            told = KVEvents(SERVER_ID, self.epoch, self.pool[1], *log.take())
            self.events += [] if is_lost else [told]

    # --- the router ---------------------------------------------------------------------------------

    def _start_router(self) -> None:
        self.rig = Rig()
        self.rig.register("memory-1")
        self.rig.join(THERE)
        self._meet()

    def _meet(self) -> None:
        """The router hears of the server, and of a worker that has its blocks; the last one's is gone."""
        for worker in [worker for worker in self.rig.pool if worker.ready.memory_server_id == SERVER_ID]:
            self.rig.pool.remove(worker)
        self.rig.register(SERVER_ID, self.epoch)
        self.rig.join(self.pool, epoch=self.epoch)
        self.predictions: list[Prediction] = []

    @rule(numbers=TEXT)
    def predict(self, numbers: list[int]) -> None:
        self.predictions.append(self.rig.pool.prefixes.predict(self.pool, short(numbers)))

    @rule()
    def end(self) -> None:
        if self.predictions:
            self.rig.pool.prefixes.end(self.predictions.pop(0))

    # --- between them -------------------------------------------------------------------------------

    @rule(num_messages=st.integers(1, 4))
    def events_arrive(self, num_messages: int) -> None:
        for _ in range(min(num_messages, len(self.events))):
            self.rig.reader.on_events(b"", self.events.popleft())

    @rule(is_lost=st.booleans())
    def a_question_arrives(self, is_lost: bool) -> None:
        self.asked += [message for to, message in self.rig.sent if isinstance(message, KVEventsWanted)]
        self.rig.sent.clear()
        if self.asked and self.asked.popleft().pool_id == self.pool[1] and not is_lost:
            self.index.sealed.log.begin()

    @rule(duration_s=st.sampled_from([0.1, ASK_S, MOMENT_S]))
    def time_passes(self, duration_s: float) -> None:
        self.rig.now_s += duration_s
        self.rig.reader.check()

    @rule(what=st.sampled_from(Misfortune))
    def something_happens(self, what: Misfortune) -> None:
        match what:
            case Misfortune.FAULT:
                self.pools.taint(WRITER)
                self.is_void = True
            case Misfortune.POOL:
                self.pools.leave(WRITER)
                self.pools.reclaim(WRITER)
                self._join()
                self._meet()
            case Misfortune.COPY:
                self.copies.problem = "it fails"
            case Misfortune.SILENCE:
                self.time_passes(2 * NET.worker_timeout_s)
            case Misfortune.DEAF:
                self.index.sealed.log.stop()
            case Misfortune.LOST:
                self.rig.servers.on_unreachable([(f"{SERVER_ID}.{self.epoch:x}".encode(), KVEventsWanted(0))])
                self.rig.reader.check()
                self.rig.register(SERVER_ID, self.epoch)
            case Misfortune.SERVER:
                self._start_server()
                self._meet()
            case Misfortune.ROUTER:
                self._start_router()

    # --- what holds ---------------------------------------------------------------------------------

    @invariant()
    def nobody_is_believed_to_have_more_than_there_is(self) -> None:
        contents = self.rig.pool.prefixes.contents(self.pool)
        assert len(contents.reported) <= NUM_BLOCKS and not contents.reported & contents.parked

    @property
    def there(self) -> set[int]:
        found = [] if self.is_void else [found[0] for found in self.index.sealed.block_of]
        return set(short(found))

    @property
    def parked(self) -> set[int]:
        """What is in host memory only."""
        is_served = self.tier.served is not None and self.tier.served.index is self.index
        return set(short([key[0] for key in self.tier.slots.slot_of])) - self.there if is_served else set()

    @rule()
    def all_is_known_once_it_is_quiet(self) -> None:
        while self.predictions:
            self.end()
        self.copy_all()
        for _ in range(4):  # what is missing is noticed, asked for, told
            self.tell(is_beat=True, is_lost=False)
            while self.index.sealed.log.has_news:
                self.tell(is_beat=False, is_lost=False)
            self.events_arrive(1000)
            self.time_passes(1.1 * ASK_S)
            while self.asked or self.rig.sent:
                self.a_question_arrives(is_lost=False)
        contents = self.rig.pool.prefixes.contents(self.pool)
        parked = set[int]() if self.tier.is_lost else self.parked
        assert contents.is_reported and (contents.reported, contents.parked) == (self.there, parked)
        for number in range(31):
            [one] = short([number])
            known = self.rig.pool.prefixes.find(self.pool, [one]).num_there
            assert known == (one in self.there), "what was predicted and did not come is forgotten"


TestMachine = pytest.mark.medium(Machine.TestCase)
TestMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
