"""A prompt on the way here from another pool."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.kv.copies import Copies
from common.memory.client.lease_cache import Grant
from common.serving.worker.peer_servers import PeerServer
from common.wire.messages.memory import KVOffer
from common.wire.values.packing import unpack_ids
from decode_worker.sequences.sequence import DecodeSequence


@dataclass(slots=True, eq=False)
class Handoff:
    """Blocks of another pool to be pulled here, except for blocks cached here already."""

    sequence: DecodeSequence
    server: PeerServer
    offer: KVOffer
    source_ids: Sequence[Sequence[int]]  # by group
    root: bytes = b""  # start of the chain of keys; b"": no block is looked up or sealed
    digests: list[bytes] = field(default_factory=list)  # of full blocks
    is_looked_up: bool = False  # ask the memory server for cached blocks
    grant: Grant | None = None  # all blocks here, until the sequence has a table
    copies: Copies = field(default_factory=Copies)
    aborted: bool = False

    @property
    def generations(self) -> dict[int, int]:
        """Generation of each offered block, by block id."""
        return dict(zip(unpack_ids(self.offer.block_ids), unpack_ids(self.offer.generations), strict=True))
