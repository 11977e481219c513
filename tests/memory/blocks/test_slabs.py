"""Groups lend memory to each other, in any order: what fits is given, and no two blocks in use share a byte."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, count

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.memory.blocks.index import BlockIndex
from common.memory.blocks.offers import OfferKey
from common.wire.messages.memory_reports import BlockEvent
from common.wire.values.kv_layout import Counts, KVGroup, KVLayout
from common.wire.values.pool_shape import PoolShape, are_enough, minus
from tests.memory.slab_audit import check_slabs
from tests.support.layouts import full, latent, state, window

FREED = 255
FEW = st.integers(0, 9)
GROUPS: list[list[KVGroup]] = [
    [full(1, 1, 3, 4, "float32"), window(4, 9)],
    [full(1, 1, 1, 4, "float32"), window(4, 9, 5), state(7)],
    [state(50), latent(4, 2)],
    [window(4, 6, 2), full(1, 1, 1, 4, "float16"), window(4, 20, 3)],
    [full(1, 1, 2, 4, "float32"), latent(4, 3)],
    [full(1, 1, 2, 4, "float32")],
]


@dataclass(eq=False)
class Text:
    """Blocks of a client, all of whose bytes are the text's number."""

    number: int  # of the client, too
    block_ids: np.ndarray  # in use: [num_blocks] intp
    generations: np.ndarray
    keys: dict[int, bytes] = field(default_factory=dict)  # of sealed blocks
    target: OfferKey | None = None  # of an open offer


class Slabs(RuleBasedStateMachine):
    @initialize(groups=st.sampled_from(GROUPS), numbers=st.tuples(*[st.integers(3, 12)] * 3), lends=st.integers(0, 4))
    def open(self, groups: list[KVGroup], numbers: tuple[int, ...], lends: int) -> None:
        num_blocks, layout = numbers[: len(groups)], KVLayout("model", tuple(groups))
        floor = tuple(max(1, (each - 1) // (lends + 1)) for each in num_blocks)
        self.shape = PoolShape(layout, num_blocks, floor if lends < 4 else (1,) * len(groups))
        self.content = np.full(self.shape.num_bytes, FREED, np.uint8)
        self.index = BlockIndex(self.shape, self._on_free)
        self.numbers, self.texts, self.gone = count(1), list[Text](), list[Text]()
        self.byte_at: dict[tuple[int, int], int] = {}  # by block and generation
        self.told: set[bytes] = set()  # keys of which the router was told that they find a block
        self._listen()

    def _listen(self) -> None:
        log, leases, begin = self.index.sealed.log, self.index.leases, self.index.leases.begin

        def add(event: BlockEvent, keys: np.ndarray) -> None:
            packed = {key.tobytes() for key in keys}
            assert packed.isdisjoint(self.told) if event is BlockEvent.SEALED else packed <= self.told
            self.told = self.told | packed if event is BlockEvent.SEALED else self.told - packed

        def begun(client: int, block_ids: np.ndarray) -> None:
            assert self.told == self.index.sealed.block_of.keys(), "leased before the router hears what is lost"
            begin(client, block_ids)

        log.add, leases.begin = add, begun  # type: ignore[method-assign]

    def _on_free(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.fill(block_id, FREED)

    def fill(self, block_id: int, byte: int) -> None:
        offset, num_bytes = self.shape.place(block_id)
        self.content[offset : offset + num_bytes] = byte

    def holds(self, block_id: int, byte: int) -> bool:
        offset, num_bytes = self.shape.place(block_id)
        return bool((self.content[offset : offset + num_bytes] == byte).all())

    # --- what clients do ---------------------------------------------------------------------------

    @rule(shares=st.tuples(*[st.integers(0, 10)] * 3), tenths=st.integers(1, 10))
    def lease(self, shares: tuple[int, ...], tenths: int) -> None:
        """As many as fit of a mix."""
        most = self.index.num_free
        counts = tuple(each * share * tenths // 100 for each, share in zip(most, shares, strict=False))
        while not self.index.fits(counts):
            counts = tuple(each // 2 for each in counts)
        self._leased(counts)

    def _leased(self, counts: Counts) -> Text:
        number = next(self.numbers)
        block_ids = self.index.lease(number, counts)
        assert self.shape.count(block_ids.tolist()) == counts, "it was told to fit"
        assert all(self.holds(block_id, FREED) for block_id in block_ids.tolist())
        for block_id in block_ids.tolist():
            self.fill(block_id, number % FREED)
            self.byte_at[block_id, int(self.index.leases.generation[block_id])] = number % FREED
        self.texts.append(Text(number, block_ids, self.index.leases.generation[block_ids].copy()))
        return self.texts[-1]

    def _any(self, index: int, *, is_offered: bool = False) -> Text | None:
        texts = [text for text in self.texts if (text.target is not None) == is_offered]
        return texts[index % len(texts)] if texts else None

    @rule(index=FEW, share=st.integers(1, 4))
    def seal(self, index: int, share: int) -> None:
        text = self._any(index)
        if text is None or not self.shape.layout.is_reusable:
            return
        are_new = np.array([block_id not in text.keys for block_id in text.block_ids.tolist()], bool)
        chosen = np.flatnonzero(are_new)[::share]
        keys = [b"%08d%08d" % (text.number, each) for each in chosen.tolist()]
        self.index.seal(text.number, text.block_ids[chosen], text.generations[chosen], b"".join(keys))
        text.keys |= dict(zip(text.block_ids[chosen].tolist(), keys, strict=True))

    @rule(index=FEW)
    def free(self, index: int) -> None:
        if (text := self._any(index)) is not None:
            self.index.free(text.number, text.block_ids, text.generations)
            self.texts.remove(text)

    @precondition(lambda self: any(self.index.sealed.num_cached))
    @rule(every=st.integers(1, 5), first=FEW, shares=st.tuples(*[st.integers(0, 3)] * 3))
    def read(self, every: int, first: int, shares: tuple[int, ...]) -> None:
        """Some cached blocks, and some more beside them if all fit."""
        found = [cached.block_ids[first::every] for cached in self.index.sealed.cached]
        counts = shares[: len(found)]
        if not self.index.fits(counts, found):
            return
        number, block_ids = next(self.numbers), np.concatenate(found)
        self.index.sealed.read(number, block_ids)
        keys = {block_id: self.index.sealed.key[block_id].tobytes() for block_id in block_ids.tolist()}
        self.texts.append(Text(number, block_ids, self.index.leases.generation[block_ids].copy(), keys))
        self._leased(counts)

    @rule(index=FEW)
    def offer(self, index: int) -> None:
        if (text := self._any(index)) is not None:
            text.target = OfferKey(next(self.numbers), "r", 0)
            are_sealed = np.array([block_id in text.keys for block_id in text.block_ids.tolist()], bool)
            self.index.offer(text.number, text.target, text.block_ids, text.generations, are_sealed)

    @rule(index=FEW, accepts=st.booleans())
    def answer(self, index: int, accepts: bool) -> None:
        if (text := self._any(index, is_offered=True)) is None or text.target is None:
            return
        if accepts:
            self.index.accept(text.target)
            text.number, text.target = text.target.client, None
        else:
            self.index.decline(text.target)
            self.texts.remove(text)

    @rule(index=FEW)
    def leave(self, index: int) -> None:
        if (text := self._any(index)) is not None:
            self.index.leave(text.number)
            self.texts.remove(text)
            self.gone.append(text)

    @precondition(lambda self: self.gone)
    @rule()
    def reclaim(self) -> None:
        self.index.reclaim(self.gone.pop(0).number)

    # --- what always holds --------------------------------------------------------------------------

    @invariant()
    def blocks_are_where_they_may_be(self) -> None:
        check_slabs(self.index)

    @invariant()
    def what_is_in_use_or_found_stays(self) -> None:
        sealed, generation = self.index.sealed, self.index.leases.generation
        assert self.told == sealed.block_of.keys()
        held = ((text.block_ids.tolist(), text.generations.tolist()) for text in [*self.texts, *self.gone])
        found = list(sealed.block_of.values())
        for block_ids, generations in [*held, (found, generation[found].tolist())]:
            for block in zip(block_ids, generations, strict=True):
                assert self.holds(block[0], self.byte_at[block]) and generation[block[0]] == block[1]

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        self._let_go_of_all(but=(lone := self._lone()))
        if lone is not None:
            rest = minus(self.shape.assured, self.shape.count(lone.block_ids.tolist()))
            assert self.index.fits(rest), "a lone text cannot have what is assured"
            self._leased(rest)
            check_slabs(self.index)
        self._let_go_of_all()
        assert self.index.num_free == self.shape.capacity, "not all has come back"
        for group, most in enumerate(self.shape.capacity):
            text = self._leased(tuple(most * (number == group) for number in range(len(self.shape.capacity))))
            check_slabs(self.index)
            self.index.free(text.number, text.block_ids, text.generations)

    def _lone(self) -> Text | None:
        """A text with no more than the longest sequence has, if there is one."""
        groups = self.shape.layout.groups
        columns = zip(groups, self.shape.assured, self.shape.floor, strict=True)
        most = tuple(assured if group.is_append_only else min(assured, floor) for group, assured, floor in columns)
        texts = (text for text in self.texts if text.target is None)
        return next((text for text in texts if are_enough(most, self.shape.count(text.block_ids.tolist()))), None)

    def _let_go_of_all(self, but: Text | None = None) -> None:
        while self.gone:
            self.reclaim()
        for text in list(self.texts):
            if text.target is not None:
                self.index.decline(text.target)
            elif text is not but:
                self.index.free(text.number, text.block_ids, text.generations)
        self.texts = [but] if but is not None and but in self.texts else []


Slabs.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
test_what_fits_is_given_and_no_two_blocks_in_use_share_a_byte = pytest.mark.medium(Slabs.TestCase)


def test_a_group_gets_memory_that_another_does_not_use_and_gives_it_back() -> None:
    layout = KVLayout("model", (full(1, 1, 1, 4, "float32"), window(4, 9)))
    index = BlockIndex(PoolShape(layout, (40, 40), (0, 4)))
    most = index.num_free
    assert most[0] > 70, "nearly all memory is one group's, if it asks for that"
    block_ids = index.lease(1, (most[0], 0))
    assert index.num_free == (0, index.shape.assured[1]), "the other keeps its floor"
    index.free(1, block_ids, index.leases.generation[block_ids])
    assert index.num_free == most == index.shape.capacity
    assert len(index.lease(1, (0, most[1]))) == most[1]


def test_what_was_cached_longest_is_evicted_whatever_its_group() -> None:
    layout = KVLayout("model", (full(1, 1, 1, 4, "float32"), window(4, 9)))
    index = BlockIndex(PoolShape(layout, (40, 40), (0, 4)))

    def cache(counts: Counts, name: bytes) -> None:
        block_ids = index.lease(1, counts)
        generations = index.leases.generation[block_ids]
        index.seal(1, block_ids, generations, b"".join(name + b"%15d" % i for i in range(len(block_ids))))
        index.free(1, block_ids, generations)

    def num_left(name: bytes) -> int:
        return sum(key.startswith(name) for key in index.sealed.block_of)

    cache((30, 0), b"a")
    cache((0, 30), b"b")
    num_vacant = index.num_free[1] - 30 - 30
    cache((0, num_vacant + 20), b"c")
    assert num_left(b"b") == 30 and num_left(b"c") == num_vacant + 20, "the others were cached later"
    assert num_left(b"a") <= 10, "another group's, but older"


def test_a_pool_of_one_group_gives_blocks_in_the_order_in_which_they_came_back() -> None:
    index = BlockIndex(PoolShape(KVLayout("model", (full(1, 1, 1, 4, "float32"),)), (10,)))
    assert index.lease(1, (4,)).tolist() == [1, 2, 3, 4]
    returned = np.array([2, 4, 1])
    index.free(1, returned, index.leases.generation[returned])
    assert index.lease(1, (5,)).tolist() == [1, 4, 2, 5, 6]
    assert list(chain.from_iterable(index.slabs.free_ids)) == [9, 8, 7]
