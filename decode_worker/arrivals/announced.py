"""Requests that the router announced, and offers of their prompts; whichever comes first waits for the other.

    DecodeRequest ──▶ announced ──KVOffer──▶ received: this worker owns the request
    KVOffer ──▶ early ──DecodeRequest──▶ received
                  └──nobody announces it──▶ declined

The router sends `DecodeRequest` before the prompt is computed. So an offer without one is early by a moment at most, or
its request was aborted.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from common.memory.client.shared_pool import SharedPool
from common.serving.worker.peer_servers import Visit
from common.wire.messages.memory import KVOffer
from decode_worker.sequences.sequence import DecodeSequence, Key

EARLY_S = 2.0
"""How long an offer waits for its request."""


class Received(NamedTuple):
    """A prompt that is computed, and what will be decoded of it."""

    sequence: DecodeSequence
    offer: KVOffer
    visit: Visit | None  # where its blocks are; None: in this worker's own pool


class Announced:
    """Owner of requests that are computed elsewhere, until they are received or aborted."""

    def __init__(self, shared: SharedPool, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._shared, self._clock = shared, clock
        self._sequences: dict[str, DecodeSequence] = {}  # by request id: the latest attempt
        self._early: dict[Key, tuple[KVOffer, Visit | None, float]] = {}  # with the time of arrival, oldest first

    def __contains__(self, key: Key) -> bool:
        sequence = self._sequences.get(key[0])
        return sequence is not None and sequence.key == key

    def announce(self, sequence: DecodeSequence) -> Received | None:
        """Expect the offer of a request's prompt; returns it if it is here."""
        self._sequences[sequence.request_id] = sequence
        early = self._early.pop(sequence.key, None)
        return None if early is None else self.offer(early[0], early[1])

    def offer(self, offer: KVOffer, visit: Visit | None) -> Received | None:
        """Receive an offer, which its prefill worker is told; keep one that is early, drop one whose server is lost."""
        key = offer.request_id, offer.attempt
        if visit is not None and visit.problem:
            return None
        if key not in self:
            if key in self._early:
                self._decline(offer, visit)
            else:
                self._early[key] = offer, visit, self._clock()
            return None
        sequence = self._sequences.pop(offer.request_id)
        sequence.handed_over(offer.token_id)
        (self._shared if visit is None else visit.guest).receive_offer(offer)
        return Received(sequence, offer, visit)

    def abort(self, request_id: str, attempt: int) -> None:
        """Forget every attempt up to `attempt`."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.attempt <= attempt:
            del self._sequences[request_id]

    def take_back(self) -> list[Key]:
        """Forget and return every request."""
        keys = [sequence.key for sequence in self._sequences.values()]
        self._sequences.clear()
        return keys

    def tend(self) -> None:
        """Decline offers that nobody announced for long; looks at no more than those."""
        while self._early:
            key, (offer, visit, arrived_s) = next(iter(self._early.items()))
            if self._clock() - arrived_s < EARLY_S:
                return
            del self._early[key]
            self._decline(offer, visit)

    def _decline(self, offer: KVOffer, visit: Visit | None) -> None:
        (self._shared if visit is None else visit.guest).decline(offer)
