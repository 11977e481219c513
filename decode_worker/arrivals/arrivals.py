"""Requests that do not decode yet, wherever their prompts come from."""

from collections.abc import Iterator
from dataclasses import dataclass

from common.serving.prompts.requests import Key
from decode_worker.arrivals.announced import Announced
from decode_worker.arrivals.local_prompts import LocalPrompts
from decode_worker.arrivals.offers import Offers
from decode_worker.arrivals.pulls import Pulls
from decode_worker.sequences.sequence import DecodeSequence


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Owners of requests on the way into the batch."""

    announced: Announced
    pulls: Pulls
    offers: Offers
    local_prompts: LocalPrompts

    @property
    def num_handoffs(self) -> int:
        """Offers that wait or are pulled, and prompts pulled ahead."""
        pulls = self.pulls
        return len(self.offers.waiting) + len(pulls.waiting) + len(pulls.transfers.under_way) + len(pulls.early.ahead)

    def has(self, key: Key) -> bool:
        """Tell whether a request is announced or waiting, or its prompt is computed here.

        The scheduler knows prompts being pulled.
        """
        is_offered = key in self.pulls.waiting or key in self.offers.waiting
        return is_offered or key in self.announced or key in self.local_prompts.scheduler.prompts

    def waiting(self) -> Iterator[DecodeSequence]:
        """Yield the sequences of prompts that wait or are computed here."""
        for each in (*self.pulls.waiting, *self.offers.waiting, *self.local_prompts.scheduler.prompts.values()):
            yield each.sequence

    def abort(self, request_id: str, attempt: int) -> None:
        """Forget every attempt up to `attempt`."""
        for owner in (self.announced, self.pulls, self.offers, self.local_prompts):
            owner.abort(request_id, attempt)

    def release_blocks(self) -> bool:
        """Free blocks of sequences that have not begun to decode; tell whether there were any."""
        prompts = self.local_prompts
        is_released = prompts.prefixes.grants.release(prompts.scheduler.waiting)
        return is_released or self.pulls.release_blocks() or self.offers.release_blocks()

    def take_back(self) -> list[Key]:
        """Forget and return prompts that wait for blocks or offers."""
        waiting = [prompt.key for prompt in self.local_prompts.scheduler.waiting]
        for key in waiting:
            self.local_prompts.abort(*key)
        return [*waiting, *self.announced.take_back()]

    def drop_all(self) -> list[DecodeSequence]:
        """Forget every request; return the sequences of prompts that waited or were computed here."""
        waiting = list(self.waiting())
        self.announced.take_back()
        self.pulls.drop_all()
        self.offers.drop_all()
        self.local_prompts.abort_all()
        return waiting
