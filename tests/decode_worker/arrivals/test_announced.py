"""A request that is computed elsewhere and the offer of its prompt find one another, whichever comes first."""

from types import SimpleNamespace
from typing import cast

from common.memory.client.shared_pool import SharedPool
from common.serving.worker.peer_servers import PeerServer
from common.wire.messages.memory import KVOffer
from decode_worker.arrivals.announced import EARLY_S, Announced
from tests.decode_worker.bench import prompt_of
from tests.support.messages import kv_offer


class Side:
    """A pool, or a peer in another one: notes what is answered there."""

    def __init__(self) -> None:
        self.problem = ""
        self.said: list[tuple[str, str, int]] = []

    def receive_offer(self, offer: KVOffer) -> None:
        self.said.append(("received", offer.request_id, offer.attempt))

    def decline(self, offer: KVOffer) -> None:
        self.said.append(("declined", offer.request_id, offer.attempt))


class Rig:
    """Requests announced to a worker with a pool of its own, `home`, and one that it visits, `abroad`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.home, self.abroad = Side(), Side()
        self.visit = cast(PeerServer, SimpleNamespace(peer=self.abroad, problem=""))
        self.announced = Announced(cast(SharedPool, self.home), clock=lambda: self.now_s)

    def announce(self, name: str, attempt: int = 0) -> str:
        """Return the name of the request if that is received with it."""
        received = self.announced.announce(prompt_of(name, range(8), attempt))
        return "" if received is None else received.sequence.request.request_id

    def offer(self, name: str, attempt: int = 0, *, abroad: bool = False) -> str:
        """Return the name of the request if that is received with it."""
        received = self.announced.offer(kv_offer(name, [1, 2], attempt=attempt), self.visit if abroad else None)
        return "" if received is None else received.sequence.request.request_id

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.announced.decline_unannounced()


def test_a_request_is_received_with_its_offer_and_its_prefill_worker_is_told() -> None:
    rig = Rig()
    sequence = prompt_of("a", range(8))
    assert rig.announced.announce(sequence) is None and ("a", 0) in rig.announced
    received = rig.announced.offer(kv_offer("a", [1, 2], token_id=9), None)
    assert received is not None and received.sequence is sequence
    assert (list(sequence.token_ids), sequence.num_outputs) == ([*range(8), 9], 1)
    assert ("a", 0) not in rig.announced and rig.home.said == [("received", "a", 0)]


def test_an_early_offer_waits_for_its_request() -> None:
    for abroad in (False, True):
        rig = Rig()
        assert not rig.offer("a", abroad=abroad)
        rig.pass_time(EARLY_S / 2)
        assert not rig.announce("b") and rig.announce("a") == "a"
        side, other = (rig.abroad, rig.home) if abroad else (rig.home, rig.abroad)
        assert side.said == [("received", "a", 0)] and not other.said
        rig.pass_time(2 * EARLY_S)
        assert len(side.said) == 1


def test_an_offer_that_nobody_announces_is_declined_after_a_while() -> None:
    rig = Rig()
    rig.announce("other")
    rig.offer("a", abroad=True)
    rig.pass_time(EARLY_S / 2)
    rig.offer("b")
    rig.pass_time(EARLY_S / 2)
    assert rig.abroad.said == [("declined", "a", 0)] and not rig.home.said
    rig.pass_time(EARLY_S / 2)
    assert rig.home.said == [("declined", "b", 0)]
    assert not rig.announce("a"), "what is declined does not come again"


def test_an_offer_that_comes_twice_is_declined_once() -> None:
    rig = Rig()
    rig.offer("a", abroad=True)
    rig.offer("a")
    assert rig.home.said == [("declined", "a", 0)] and not rig.abroad.said
    assert rig.announce("a") == "a" and rig.abroad.said == [("received", "a", 0)]


def test_an_abort_ends_every_attempt_up_to_its_own() -> None:
    rig = Rig()
    rig.announce("a", attempt=1)
    rig.announced.abort("a", 0)
    assert ("a", 1) in rig.announced
    rig.announced.abort("a", 1)
    rig.announced.abort("never came", 3)
    assert ("a", 1) not in rig.announced
    assert not rig.offer("a", attempt=1), "it is nobody's"
    rig.pass_time(EARLY_S)
    assert rig.home.said == [("declined", "a", 1)]


def test_an_offer_is_of_the_attempt_that_was_announced() -> None:
    rig = Rig()
    rig.announce("a", attempt=2)
    assert not rig.offer("a", attempt=1) and rig.offer("a", attempt=2) == "a"
    rig.pass_time(EARLY_S)
    assert rig.home.said == [("received", "a", 2), ("declined", "a", 1)]


def test_an_offer_at_a_memory_server_that_is_lost_counts_for_nothing() -> None:
    """Its prefill worker is told, or lost as well."""
    rig = Rig()
    rig.announce("a")
    rig.offer("early", abroad=True)
    cast(SimpleNamespace, rig.visit).problem = "lost"
    assert not rig.offer("a", abroad=True) and not rig.announce("early")
    assert ("a", 0) in rig.announced and not rig.abroad.said, "it may be offered again, or aborted"


def test_requests_that_are_taken_back_are_the_routers_again() -> None:
    rig = Rig()
    rig.announce("a")
    assert rig.announced.take_back() == [("a", 0)] and not rig.announced.take_back()
    assert ("a", 0) not in rig.announced and not rig.offer("a")
