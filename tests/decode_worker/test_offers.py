"""Prompts that change hands in a shared pool: taken in their order as there is room, and declined for a reason."""

from types import SimpleNamespace
from typing import Any, cast

from common.errors import ErrorCode
from common.memory.client import MemoryClient, PoolClaim
from common.memory.shared_pool import SharedPool
from common.serving.drain import Drain
from common.serving.standstill import LEAST_S, Standstill
from common.wire.memory_messages import BlocksLeased, KVAccepted, KVDeclined, KVOffer, MemoryMessage
from common.wire.messages import Inquiry, InquiryReply, Message
from common.wire.packing import pack_ids
from common.wire.router_link import RouterLink
from common.wire.sampling_params import SamplingParams
from common.wire.sockets import Hub
from decode_worker.attempts import Attempts
from decode_worker.guides import Guides
from decode_worker.inbox import Inbox
from decode_worker.local_prompts import LocalPrompts
from decode_worker.offers import Offers
from decode_worker.pulls import Pulls
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sealing import Sealing
from decode_worker.sequence import DecodeSequence, Key
from tests.layouts import pool_of

BLOCK_SIZE = 4
VOCAB = 100


class Rig:
    """A decode worker's part in a pool of 40 blocks, of which it has the first few at hand."""

    def __init__(self, num_at_hand: int = 4, max_num_seqs: int = 8) -> None:
        self.said: list[MemoryMessage] = []
        self.arriving: list[Message] = []
        client = SimpleNamespace(send=self.said.append, receive=self._arrived, path="memory.sock")
        self.shared = SharedPool(cast(MemoryClient, client), PoolClaim(b"", None, 0, 7, pool_of(40, BLOCK_SIZE)))
        ids = range(1, num_at_hand + 1)
        self.shared.magazine.leased(BlocksLeased(pack_ids(ids), pack_ids([1] * num_at_hand)))
        self.scheduler = DecodeScheduler(self.shared.magazine, max_num_seqs, 1000)
        self.aborts = Attempts()
        self.offers = Offers(self.shared, self.scheduler, self.aborts, Sealing(self.shared.magazine), VOCAB)
        self.num_offered = 0

    def _arrived(self, *kinds: type[Any]) -> list[Message]:
        arrived, self.arriving = self.arriving, []
        return arrived

    def offer(self, name: str, num_tokens: int = 8, **fields: Any) -> KVOffer:
        """Of a prompt and its first output, in blocks of its own."""
        num_blocks = -(-(num_tokens - 1) // BLOCK_SIZE)
        ids = range(20 + self.num_offered, 20 + self.num_offered + num_blocks)
        self.num_offered += num_blocks
        ordinary: dict[str, Any] = {
            "attempt": 0, "num_outputs": 1, "sampling": SamplingParams(max_tokens=8),
            "token_ids": pack_ids([1] * num_tokens), "block_ids": pack_ids(ids), "generations": pack_ids(ids),
            "num_sealed": 0, "root": b"", "digest": b"",
        }  # fmt: skip
        return KVOffer("d", 1, name, **ordinary | fields)

    def enter(self) -> list[str]:
        accepted = self.offers.accept()
        for sequence in accepted:
            self.scheduler.activate(sequence)
        return [sequence.request_id for sequence in accepted]


def test_they_are_taken_in_order_as_long_as_each_has_a_row_and_those_before_it_can_grow() -> None:
    rig = Rig(num_at_hand=1)
    for name in "abc":
        rig.offers.add(rig.offer(name))
    assert rig.enter() == ["a", "b"] and len(rig.offers) == 1
    assert not rig.said, "a step may be launched first"
    rig.offers.tend((0,))
    assert rig.said[:2] == [KVAccepted("a", 0), KVAccepted("b", 0)]
    assert [rig.scheduler.active[name, 0].tables[0].block_ids.tolist() for name in "ab"] == [[20, 21], [22, 23]]
    rig.shared.magazine.leased(BlocksLeased(pack_ids([9]), pack_ids([1])))
    assert rig.enter() == ["c"] and not rig.offers.has(("c", 0))
    few = Rig(max_num_seqs=1)
    for name in "ab":
        few.offers.add(few.offer(name))
    assert few.enter() == ["a"] and few.enter() == []
    few.scheduler.end(few.scheduler.active["a", 0])
    assert few.enter() == ["b"]
    few.shared.magazine.check(few.scheduler.blocks())


def test_what_was_handed_over_before_in_another_pool_takes_a_row_before() -> None:
    rig, before_s = Rig(max_num_seqs=2), list[float]()
    for name in "abc":
        rig.offers.add(rig.offer(name))

    def start_older(offered_s: float) -> None:
        before_s.append(offered_s)
        if len(before_s) == 2:
            rig.scheduler.reserve_prompt(DecodeSequence("older", 0, [1], 1, SamplingParams()))

    waiting = [each.sequence for each in rig.offers.waiting]
    assert [sequence.request_id for sequence in rig.offers.accept(start_older)] == ["a"]
    assert before_s == [sequence.offered_s for sequence in waiting[:2]]


def test_what_can_never_be_decoded_here_is_declined_and_nobody_waits_behind_it() -> None:
    rig = Rig()
    wrong = [
        rig.offer("long", sampling=SamplingParams(max_tokens=1000)),
        rig.offer("strange", token_ids=pack_ids([VOCAB] * 8)),
        rig.offer("short", block_ids=pack_ids([9]), generations=pack_ids([9])),
    ]
    for offer in [*wrong, rig.offer("good")]:
        rig.offers.add(offer)
    assert rig.said == [KVDeclined(offer.request_id, 0) for offer in wrong]
    failures = [(key[0], code) for key, code, _ in rig.offers.take_failures()]
    codes = [ErrorCode.NEVER_FITS, ErrorCode.INTERNAL, ErrorCode.INTERNAL]
    assert failures == list(zip(["long", "strange", "short"], codes, strict=True))
    assert rig.enter() == ["good"] and not rig.offers.take_failures()


def test_an_abort_may_come_before_or_after_the_offer() -> None:
    rig = Rig()
    rig.aborts.note("a", 0)
    rig.offers.add(rig.offer("a"))
    rig.offers.add(rig.offer("a", attempt=1))
    rig.offers.add(rig.offer("b"))
    assert rig.said == [KVDeclined("a", 0)]
    rig.offers.abort("a", 1)
    assert rig.said == [KVDeclined("a", 0), KVDeclined("a", 1)]
    assert rig.enter() == ["b"] and not rig.offers.take_failures()


def test_that_an_offer_was_accepted_is_said_once_and_before_anything_else() -> None:
    rig = Rig()
    rig.offers.add(rig.offer("a"))
    assert rig.enter() == ["a"]
    rig.aborts.note("b", 0)
    rig.offers.add(rig.offer("b"))
    assert rig.said == [KVAccepted("a", 0), KVDeclined("b", 0)]
    rig.offers.tend((0,))
    assert KVAccepted("a", 0) not in rig.said[2:]


def test_the_latest_makes_way_for_what_is_decoded_already() -> None:
    rig = Rig(num_at_hand=0)
    for name in "abc":
        rig.offers.add(rig.offer(name))
    assert rig.enter() == ["a"]
    assert rig.offers.make_way() and rig.shared.magazine.has((2,)), "its blocks are at hand here, and nobody else's"
    assert [(key, code) for key, code, _ in rig.offers.take_failures()] == [(("c", 0), ErrorCode.PREEMPTED)]
    assert [sequence.request_id for sequence in rig.offers.decline_all()] == ["b"]
    assert not rig.offers.make_way()
    rig.shared.magazine.check(rig.scheduler.blocks())


def test_of_prompts_that_fill_a_pool_the_latest_makes_way_for_the_first_to_grow() -> None:
    """Nothing else would: nobody decodes, and the prefill worker waits for blocks itself."""
    now_s = 0.0
    rig = Rig(num_at_hand=0)
    rig.offers.standstill = Standstill(clock=lambda: now_s, chance=lambda: 0.5)
    rig.offers.add(rig.offer("first", num_tokens=9))  # its prompt fills two blocks, so its next token has no slot
    rig.offers.add(rig.offer("second"))
    for _ in range(5):
        assert not rig.enter() and not rig.offers.take_failures()
        rig.offers.tend((0,))
        now_s += LEAST_S
        rig.shared.num_done += 1  # somebody gets on, whose blocks come free
    for _ in range(2):
        rig.offers.tend((0,))
    now_s += 1.5 * LEAST_S
    rig.offers.tend((0,))
    assert [(key, code) for key, code, _ in rig.offers.take_failures()] == [(("second", 0), ErrorCode.STANDSTILL)]
    assert rig.enter() == ["first"]
    now_s += 100.0
    rig.offers.tend((0,))
    assert not rig.offers.take_failures()


def test_what_has_arrived_is_here_when_the_router_asks() -> None:
    rig, said = Rig(), list[Message]()
    inquiry = Inquiry(("a", "b"), pack_ids([0, 0]))
    ready = SimpleNamespace(worker_id="d", epoch=1)
    link = SimpleNamespace(ready=ready, receive=lambda: [inquiry], send=said.append)
    sources = SimpleNamespace(visits=SimpleNamespace(receive=list))
    looked_for = list[Key]()
    nothing = SimpleNamespace(
        has=looked_for.append, receive=list, sources=sources, take_messages=list, take_failures=list, waiting=[]
    )
    inbox = Inbox(
        cast(RouterLink, link), cast(Hub, nothing), rig.scheduler, cast(Pulls, nothing), rig.offers,
        cast(LocalPrompts, nothing), cast(Guides, nothing), Drain(1.0),
    )  # fmt: skip
    rig.arriving.append(rig.offer("b"))
    inbox.receive()
    assert said == [InquiryReply("d", 1, ("a", "b"), pack_ids([0, 0]), b"\0\1")]
    assert {*looked_for} == {("b", 0)}, "when it came; what is asked is not looked for one by one"
