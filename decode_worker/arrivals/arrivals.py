"""Requests that do not decode yet, wherever their prompts come from."""

from dataclasses import dataclass

from decode_worker.arrivals.announced import Announced
from decode_worker.arrivals.local_prompts import LocalPrompts
from decode_worker.arrivals.offers import Failure, Offers
from decode_worker.arrivals.pulls import Pulls
from decode_worker.sequences.sequence import DecodeSequence, Key


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Owners of requests on the way into the batch."""

    announced: Announced
    pulls: Pulls
    offers: Offers
    local_prompts: LocalPrompts

    def __len__(self) -> int:
        return len(self.pulls) + len(self.offers) + len(self.local_prompts)

    def has(self, key: Key) -> bool:
        """Tell whether a prompt waits; the scheduler knows prompts being pulled or computed."""
        return key in self.pulls.waiting or key in self.offers.waiting or self.local_prompts.has(key)

    def waiting(self) -> list[DecodeSequence]:
        """Return the sequences of all waiting prompts."""
        return [each.sequence for each in (*self.pulls.waiting, *self.offers.waiting, *self.local_prompts.waiting)]

    def abort(self, request_id: str, attempt: int) -> None:
        """Forget every attempt up to `attempt`."""
        for owner in (self.announced, self.pulls, self.offers, self.local_prompts):
            owner.abort(request_id, attempt)

    def make_way(self) -> bool:
        """Free blocks of sequences that have not begun to decode; tell whether there were any."""
        return self.local_prompts.make_way() or self.pulls.make_way() or self.offers.make_way()

    def take_failures(self) -> list[Failure]:
        """Take the failed handoffs."""
        return [*self.offers.take_failures(), *self.pulls.take_failures()]

    def give_back_prompts(self) -> list[Key]:
        """Forget and return prompts that wait for blocks or offers."""
        waiting = [prompt.key for prompt in self.local_prompts.waiting]
        for key in waiting:
            self.local_prompts.abort(*key)
        return [*waiting, *self.announced.take_back()]

    def drop_all(self) -> list[DecodeSequence]:
        """Forget every request; return the sequences of prompts that waited."""
        waiting = self.waiting()
        self.announced.take_back()
        self.pulls.drop_all()
        self.offers.drop_all()
        self.local_prompts.drop_all()
        return waiting
