"""Sealing of decoded blocks, so that the next turn of a conversation finds the reply as well as the prompt."""

from common.memory.client.lease_cache import LeaseCache
from common.wire.messages.memory import KVOffer
from common.wire.values.block_key import digests
from common.wire.values.packing import pack_ids
from decode_worker.sequences.sequence import DecodeSequence


class Sealing:
    """Full blocks at the end of a step, sealed all at once."""

    def __init__(self, leases: LeaseCache) -> None:
        self.leases = leases
        self.block_size = leases.shape.layout.groups[0].block_size
        self.block_ids: list[int] = []
        self.digests: list[bytes] = []

    def begin(self, sequence: DecodeSequence, offer: KVOffer) -> None:
        """Continue the prompt's chain of keys, if the prefill worker has sealed every full block."""
        if offer.num_sealed == (len(sequence.token_ids) - 1) // self.block_size:
            sequence.num_sealed, sequence.digest = offer.num_sealed, offer.digest

    def add(self, sequence: DecodeSequence) -> None:
        """Collect the next block of a sequence if full; call when the last token is logged.

        KV of all tokens before the last is written, and the block is not written again.
        """
        begin = sequence.num_sealed * self.block_size
        end = begin + self.block_size
        if not sequence.digest or len(sequence.token_ids) - 1 < end:
            return
        tokens = pack_ids(sequence.token_ids[begin:end])
        [sequence.digest] = digests(sequence.digest, tokens, self.block_size)
        self.block_ids.append(sequence.tables[0].block_ids[sequence.num_sealed])
        self.digests.append(sequence.digest)
        sequence.num_sealed += 1

    def seal(self) -> None:
        """Seal the collected blocks; call before any of them is freed."""
        if self.block_ids:
            self.leases.seal(self.block_ids, self.digests)
            self.block_ids, self.digests = [], []
