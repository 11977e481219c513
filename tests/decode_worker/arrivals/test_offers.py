"""Prompts that change hands in a shared pool: taken in their order while there is room, and declined for a reason."""

from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, cast

from common.base.errors import ErrorCode
from common.memory.client.client import MemoryClient, PoolClaim
from common.memory.client.shared_pool import SharedPool
from common.serving.prompts.requests import Key
from common.serving.worker.drain import Drain
from common.wire.messages.memory import BlocksLeased, KVAccepted, KVDeclined, KVOffer, KVReceived, MemoryMessage
from common.wire.messages.worker import Inquiry, InquiryReply, Message
from common.wire.transport.router_link import RouterLink
from common.wire.transport.sockets import Hub
from common.wire.values.packing import pack_ids
from common.wire.values.sampling_params import SamplingParams
from decode_worker.arrivals.announced import Announced
from decode_worker.arrivals.arrivals import Arrivals
from decode_worker.arrivals.local_prompts import LocalPrompts
from decode_worker.arrivals.offers import Offers
from decode_worker.arrivals.pulls import Pulls
from decode_worker.cancellation import Cancellation
from decode_worker.inbox import Inbox
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sealing import Sealing
from decode_worker.sequences.snapshots import Snapshots
from tests.decode_worker.bench import prompt_of
from tests.support.allocator import check_owned
from tests.support.layouts import pool_of
from tests.support.messages import decode_request, kv_offer
from tests.support.sequences import blocks_of_rows

BLOCK_SIZE = 4


class Rig:
    """A decode worker's part in a pool of 40 blocks, of which it has the first few at hand."""

    def __init__(self, num_at_hand: int = 4, max_num_seqs: int = 8) -> None:
        self.said: list[MemoryMessage] = []
        self.arriving: list[Message] = []
        client = SimpleNamespace(
            connection=SimpleNamespace(send=self.said.append, ask_s=1.0, max_unanswered=10), receive=self._arrived
        )
        self.shared = SharedPool(cast(MemoryClient, client), PoolClaim(b"", None, 0, 7, pool_of(40, BLOCK_SIZE)))
        ids = range(1, num_at_hand + 1)
        self.shared.leases.receive(BlocksLeased(pack_ids(ids), pack_ids([1] * num_at_hand)))
        self.scheduler = DecodeScheduler(self.shared.leases, max_num_seqs, 1000)
        self.offers = Offers(self.shared, self.scheduler, Sealing(self.shared.leases), self._fail)
        self.failures: list[tuple[str, ErrorCode]] = []
        self.num_offered = 0

    def _arrived(self, *kinds: type[Any]) -> list[Message]:
        arrived, self.arriving = self.arriving, []
        return arrived

    def _fail(self, key: Key, code: ErrorCode, reason: str) -> None:
        self.failures.append((key[0], code))

    def offer(self, name: str, num_tokens: int = 8, num_blocks: int = 0) -> KVOffer:
        """Blocks of a prompt that was just computed; `num_tokens` counts its first output."""
        num_blocks = num_blocks or -(-(num_tokens - 1) // BLOCK_SIZE)
        ids = range(20 + self.num_offered, 20 + self.num_offered + num_blocks)
        self.num_offered += num_blocks
        return kv_offer(name, ids)

    def add(self, name: str, num_tokens: int = 8, num_blocks: int = 0) -> None:
        """Have the offer of a prompt that was announced."""
        sequence = prompt_of(name, [1] * (num_tokens - 1), sampling=SamplingParams(max_tokens=8))
        sequence.handed_over(1)
        self.offers.add(sequence, self.offer(name, num_tokens, num_blocks))

    def enter(self) -> list[str]:
        names = []
        while (sequence := self.offers.start_next()) is not None:
            self.scheduler.activate(sequence)
            names.append(sequence.request.request_id)
        return names


def test_they_are_taken_in_order_as_long_as_each_has_a_row_and_those_before_it_can_grow() -> None:
    rig = Rig(num_at_hand=1)
    for name in "abc":
        rig.add(name)
    assert rig.enter() == ["a", "b"] and len(rig.offers.waiting) == 1
    assert not rig.said, "a step may be launched first"
    rig.offers.lease_blocks((0,))
    assert rig.said[:2] == [KVAccepted("a", 0), KVAccepted("b", 0)]
    assert [rig.scheduler.active[name, 0].tables[0].block_ids.tolist() for name in "ab"] == [[20, 21], [22, 23]]
    rig.shared.leases.receive(BlocksLeased(pack_ids([9]), pack_ids([1])))
    assert rig.enter() == ["c"] and ("c", 0) not in rig.offers.waiting
    few = Rig(max_num_seqs=1)
    for name in "ab":
        few.add(name)
    assert few.enter() == ["a"] and few.enter() == []
    few.scheduler.end(few.scheduler.active["a", 0])
    assert few.enter() == ["b"]
    check_owned(few.shared.leases, blocks_of_rows(few.scheduler))


def test_blocks_that_cannot_be_the_prompts_are_declined_and_nobody_waits_behind_them() -> None:
    rig = Rig()
    rig.add("short", num_blocks=1)
    rig.add("good")
    assert rig.said == [KVDeclined("short", 0)]
    assert rig.failures == [("short", ErrorCode.INTERNAL)]
    assert rig.enter() == ["good"] and len(rig.failures) == 1


def test_what_waits_and_is_aborted_is_declined() -> None:
    rig = Rig()
    for name in "ab":
        rig.add(name)
    rig.offers.abort("a", 1)
    assert rig.said == [KVDeclined("a", 0)]
    assert rig.enter() == ["b"] and not rig.failures


def test_that_an_offer_was_received_or_accepted_is_said_once_and_before_anything_else() -> None:
    rig = Rig()
    announced = Announced(rig.shared)
    offers = [rig.offer(name) for name in "abc"]
    for offer in offers:
        announced.announce(prompt_of(offer.request_id, range(7)))
        received = announced.offer(offer, None)
        assert received is not None
        if offer is not offers[-1]:
            rig.offers.add(received.sequence, offer)
    assert not rig.said, "a step may be launched first"
    rig.scheduler.capacity.max_num_seqs = 1
    assert rig.enter() == ["a"]
    rig.shared.decline(offers[-1])
    assert rig.said == [KVAccepted("a", 0), KVReceived("b", 0), KVReceived("c", 0), KVDeclined("c", 0)]
    rig.offers.lease_blocks((0,))
    assert not [said for said in rig.said[4:] if isinstance(said, KVAccepted | KVReceived)]


def test_the_latest_makes_way_for_what_is_decoded_already() -> None:
    rig = Rig(num_at_hand=0)
    for name in "abc":
        rig.add(name)
    assert rig.enter() == ["a"]
    assert rig.offers.release_blocks() and rig.shared.leases.num_free >= (2,), (
        "its blocks are at hand here, and nobody else's"
    )
    assert rig.failures == [("c", ErrorCode.PREEMPTED)]
    assert [waiting.sequence.request.request_id for waiting in rig.offers.waiting] == ["b"]
    rig.offers.drop_all()
    assert not rig.offers.release_blocks()
    check_owned(rig.shared.leases, blocks_of_rows(rig.scheduler))


class Prompts(dict[Key, Any]):
    """None, with what was looked for."""

    looked_for: ClassVar[list[Key]] = []

    def __contains__(self, key: object) -> bool:
        self.looked_for.append(cast(Key, key))
        return False


def test_what_has_arrived_is_here_when_the_router_asks() -> None:
    rig, said = Rig(), list[Message]()
    asked = [decode_request("b", range(7)), Inquiry(("a", "b"), pack_ids([0, 0]))]
    link: Any = SimpleNamespace(worker=("d", 1), receive=lambda: asked, send=said.append)
    link.dispatch = partial(RouterLink.dispatch, link)
    sources = SimpleNamespace(peers=SimpleNamespace(receive=list))
    nothing = SimpleNamespace(
        receive=list, sources=sources, waiting=[], engine=SimpleNamespace(vocab_size=100), prefixes=None,
        scheduler=SimpleNamespace(prompts=Prompts()), early=None,
    )  # fmt: skip
    arrivals = Arrivals(Announced(rig.shared), cast(Pulls, nothing), rig.offers, cast(LocalPrompts, nothing))
    cancellation, any_of = Cancellation(rig.scheduler, arrivals, rig._fail), cast(Any, nothing)
    snapshots = Snapshots(rig.shared.leases, rig.offers.sealing, lambda source_id, target_id: None)
    inbox = Inbox(cast(RouterLink, link), cast(Hub, nothing), cancellation, any_of, Drain(1.0), snapshots)
    rig.arriving.append(rig.offer("b"))
    inbox.receive()
    assert said == [InquiryReply("d", 1, ("a", "b"), pack_ids([0, 0]), b"\0\1")]
    assert Prompts.looked_for == [("b", 0)], "when it was announced; what is asked is not looked for one by one"
