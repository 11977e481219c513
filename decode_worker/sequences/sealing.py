"""Sealing of decoded blocks, so that the next turn of a conversation finds the reply as well as the prompt."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from common.kv.tables import BlockTable
from common.memory.client.lease_cache import LeaseCache
from common.wire.messages.memory import KVOffer
from common.wire.values.block_key import digests
from common.wire.values.flags import unpack_flags
from common.wire.values.packing import pack_ids
from decode_worker.sequences.sequence import DecodeSequence, SealedChain


class Sealing:
    """Full blocks at the end of a step, sealed all at once."""

    def __init__(self, leases: LeaseCache) -> None:
        self.leases, self.layout = leases, leases.shape.layout
        self.block_size = self.layout.block_size

    def begin(self, sequence: DecodeSequence, offer: KVOffer) -> None:
        """Continue the prompt's chain of keys, if the prefill worker has sealed every full block."""
        num_full, offered = (len(sequence.token_ids) - 1) // self.block_size, np.frombuffer(offer.block_ids, np.int32)
        sealed = offered[unpack_flags(offer.are_sealed, len(offered))]
        groups = np.searchsorted(self.leases.shape.begins, sealed, side="right") - 1
        num_sealed = np.bincount(groups, minlength=len(self.layout.groups))
        if all(num_sealed[n] == num_full for n, group in enumerate(self.layout.groups) if group.is_append_only):
            sequence.chain = SealedChain(num_full, offer.digest)

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
                places = range(chain.num_blocks, chain.num_blocks + 1)
                full = [each for table in sequence.tables for each in full_blocks(table, places)]
                block_ids += [each.block_id for each in full]
                sealed += [chain.digest] * len(full)
                chain.num_blocks += 1
        if block_ids:
            self.leases.seal(block_ids, sealed)


class FullBlock(NamedTuple):
    """A full block, to be sealed under the digest of its place."""

    place: int
    block_id: int


def full_blocks(table: BlockTable, places: range) -> list[FullBlock]:
    """Return the blocks of full places that are not sealed yet; blocks of windows count as sealed from now on."""
    if not table.group.grows:
        return []
    in_sight = range(max(places.start, table.num_gone), places.stop)
    full = [FullBlock(place, table.block_ids[place]) for place in in_sight]
    if table.group.window:
        full = [each for each in full if each.block_id not in table.sealed]
        table.sealed.update(each.block_id for each in full)
    return full
