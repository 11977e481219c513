"""Open offers: blocks between the worker that gave them and the worker they are for."""

from dataclasses import dataclass

import numpy as np

from common.memory.blocks.answers import ProtocolError
from common.memory.blocks.lease_table import Holding
from common.memory.blocks.readers import Readers

OFFERS = -2
"""Client number that reads sealed blocks of open offers."""


@dataclass(frozen=True, slots=True)
class OfferKey:
    """Target client of an offer, and the attempt of a request."""

    client: int
    request_id: str
    attempt: int


class Offers(dict[OfferKey, Holding]):
    """Blocks of open offers, by offer; `readers` read their sealed blocks."""

    def __init__(self, readers: Readers) -> None:
        super().__init__()
        self.readers = readers

    def add(self, client: int, key: OfferKey, holding: Holding) -> None:
        """Take blocks over from a client; raises ProtocolError, and changes nothing, for an attempt offered already."""
        if key in self:
            raise ProtocolError(f"attempt {key.attempt} of {key.request_id} is offered already")
        self.readers.move(client, OFFERS, holding.sealed)
        self[key] = holding

    def take(self, key: OfferKey) -> Holding:
        """Remove an offer and return its blocks; raises ProtocolError if there is no such offer."""
        if (holding := self.pop(key, None)) is None:
            raise ProtocolError(f"attempt {key.attempt} of {key.request_id} is not offered to it")
        return holding

    def give(self, key: OfferKey) -> np.ndarray:
        """Give an offer to its target; return the leased blocks: [num_leased] intp. Raises like `take`."""
        leased, sealed = self.take(key)
        self.readers.move(OFFERS, key.client, sealed)
        return leased

    def give_all(self, client: int) -> int:
        """Give offers to their target, which may have accepted; return the number of leased blocks."""
        return sum(len(self.give(key)) for key in list(self) if key.client == client)
