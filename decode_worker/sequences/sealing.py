"""Sealing of decoded blocks, so that the next turn of a conversation finds the reply as well as the prompt."""

from collections.abc import Iterable

from common.memory.client.lease_cache import LeaseCache
from common.wire.messages.memory import KVOffer
from common.wire.values.block_key import digests
from common.wire.values.packing import pack_ids
from decode_worker.sequences.sequence import DecodeSequence, SealedChain


class Sealing:
    """Full blocks at the end of a step, sealed all at once."""

    def __init__(self, leases: LeaseCache) -> None:
        self.leases = leases
        self.block_size = leases.shape.layout.groups[0].block_size

    def begin(self, sequence: DecodeSequence, offer: KVOffer) -> None:
        """Continue the prompt's chain of keys, if the prefill worker has sealed every full block."""
        if offer.num_sealed == (len(sequence.token_ids) - 1) // self.block_size:
            sequence.chain = SealedChain(offer.num_sealed, offer.digest)

    def seal(self, sequences: Iterable[DecodeSequence]) -> None:
        """Seal blocks that the last logged tokens have made full; call before any of them is freed.

        KV of all tokens before the last is written, and a full block is not written again.
        """
        block_ids, sealed = list[int](), list[bytes]()
        for sequence in sequences:
            chain, num_written = sequence.chain, len(sequence.token_ids) - 1
            while chain.digest and (chain.num_blocks + 1) * self.block_size <= num_written:
                begin = chain.num_blocks * self.block_size
                tokens = pack_ids(sequence.token_ids[begin : begin + self.block_size])
                [chain.digest] = digests(chain.digest, tokens, self.block_size)
                block_ids.append(sequence.tables[0].block_ids[chain.num_blocks])
                sealed.append(chain.digest)
                chain.num_blocks += 1
        if block_ids:
            self.leases.seal(block_ids, sealed)
