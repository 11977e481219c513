"""Announced requests, and offers of prompts; whichever comes first waits for the other.

    DecodeRequest ──▶ announced ──KVOffer──▶ received: this worker owns the request
    KVOffer ──▶ early ──DecodeRequest──▶ received
                  └──not announced──▶ declined.

The router sends `DecodeRequest` before the prompt is computed. So an offer without a request is early by a moment, or
the request was aborted.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from common.memory.client.shared_pool import SharedPool
from common.serving.prompts.requests import Key, is_attempt
from common.serving.worker.peer_servers import PeerServer
from common.wire.messages.memory import KVOffer
from decode_worker.sequences.sequence import DecodeSequence

EARLY_S = 2.0
"""Time that an offer waits for its request."""


class Received(NamedTuple):
    """A computed prompt with the sequence to decode."""

    sequence: DecodeSequence
    offer: KVOffer
    server: PeerServer | None  # the pool with the blocks; None: this worker's own


class Announced:
    """Owner of requests computed elsewhere, until received or aborted."""

    def __init__(self, shared: SharedPool, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._shared, self._clock = shared, clock
        self._sequences: dict[str, DecodeSequence] = {}  # by request id: the latest attempt
        self._early: dict[Key, tuple[KVOffer, PeerServer | None, float]] = {}  # with arrival time, oldest first

    def __contains__(self, key: Key) -> bool:
        sequence = self._sequences.get(key[0])
        return sequence is not None and sequence.key == key

    def find(self, key: Key) -> DecodeSequence | None:
        """Return the sequence of an announced attempt."""
        return self._sequences[key[0]] if key in self else None

    def announce(self, sequence: DecodeSequence) -> Received | None:
        """Expect the offer of a request's prompt; return the prompt if the offer is here already."""
        self._sequences[sequence.request.request_id] = sequence
        early = self._early.pop(sequence.key, None)
        return None if early is None else self.offer(early[0], early[1])

    def offer(self, offer: KVOffer, server: PeerServer | None) -> Received | None:
        """Receive an offer and tell its prefill worker.

        An early offer is kept. An offer of a lost memory server is dropped.
        """
        key = offer.request_id, offer.attempt
        if server is not None and server.problem:
            return None
        if key not in self:
            if key in self._early:
                self._decline(offer, server)
            else:
                self._early[key] = offer, server, self._clock()
            return None
        sequence = self._sequences.pop(offer.request_id)
        sequence.handed_over(offer.token_id)
        (self._shared if server is None else server.peer).receive_offer(offer)
        return Received(sequence, offer, server)

    def abort(self, request_id: str, attempt: int) -> None:
        """Forget every attempt up to `attempt`."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and is_attempt(sequence.key, request_id, attempt):
            del self._sequences[request_id]

    def take_back(self) -> list[Key]:
        """Forget and return every request."""
        keys = [sequence.key for sequence in self._sequences.values()]
        self._sequences.clear()
        return keys

    def decline_unannounced(self) -> None:
        """Decline offers not announced for `EARLY_S`; looks at no other offers."""
        while self._early:
            key, (offer, server, arrived_s) = next(iter(self._early.items()))
            if self._clock() - arrived_s < EARLY_S:
                return
            del self._early[key]
            self._decline(offer, server)

    def _decline(self, offer: KVOffer, server: PeerServer | None) -> None:
        (self._shared if server is None else server.peer).decline(offer)
