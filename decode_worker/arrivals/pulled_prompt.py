"""A prompt on its way here from another pool than ours."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.kv.copies import Copies
from common.memory.client.magazine import Grant
from common.serving.worker.peer_servers import Visit
from common.wire.messages.memory import KVOffer
from common.wire.values.packing import unpack_ids
from decode_worker.sequences.sequence import DecodeSequence


@dataclass(slots=True, eq=False)
class Handoff:
    """Blocks in another pool that are ours to pull, but for those that our own has already."""

    sequence: DecodeSequence
    visit: Visit
    offer: KVOffer
    source_ids: Sequence[Sequence[int]]  # by group
    digests: list[bytes] = field(default_factory=list)  # of its full blocks, if those are looked up and sealed
    is_looked_up: bool = False  # the memory server is asked for its blocks, and what is there of them
    grant: Grant | None = None  # all its blocks here, until it has a table
    copies: Copies = field(default_factory=Copies)
    aborted: bool = False

    @property
    def generations(self) -> dict[int, int]:
        """Of the blocks."""
        return dict(zip(unpack_ids(self.offer.block_ids), unpack_ids(self.offer.generations), strict=True))
