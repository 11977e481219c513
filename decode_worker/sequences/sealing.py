"""Sealing of decoded blocks, so that the next turn of a conversation finds the reply as well as the prompt."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from common.memory.client.lease_cache import LeaseCache
from common.serving.prompts.stops import is_doubling
from common.wire.messages.memory import KVOffer
from common.wire.values.block_key import digests
from common.wire.values.flags import unpack_flags
from common.wire.values.kv_layout import Counts
from common.wire.values.packing import pack_ids
from common.wire.values.pool_shape import minus
from common.wire.values.resumption import needed
from decode_worker.sequences.sequence import DecodeSequence, SealedChain

DISTANCE_TOKENS = 64
"""Tokens between two snapshots.

A step reads and writes the whole state of a sequence, so copies add a 64th to that.
"""


class FullBlock(NamedTuple):
    """A full block, to be sealed under the digest of its place."""

    block_id: int
    digest: bytes


class Sealing:
    """Full blocks at the end of a step, sealed all at once.

    Blocks of windows are sealed at stops only (see `stops`): behind a pulled prompt, at doublings, and at the end of a
    sequence. A sealed block is not used again for the sequence's later places. So before the end it is sealed only if
    other blocks are at hand. Of states, the last snapshot is sealed at the end (see `snapshots`).

    Args:
        reserve: returns free blocks to leave at hand, by group.
    """

    def __init__(self, leases: LeaseCache, reserve: Callable[[], Counts] | None = None) -> None:
        self.leases, self.layout = leases, leases.shape.layout
        self.reserve = reserve or (lambda: self.layout.nothing)
        self.block_size = self.layout.block_size
        self.distance = -(-DISTANCE_TOKENS // self.block_size)  # places between two snapshots
        windows = (group for group in self.layout.groups if group.window)
        most_seen = max((len(needed(group, group.window)) for group in windows), default=0)
        self.most_kept = max(most_seen, self.distance + 1 if self.layout.states else 0)

    def begin(self, sequence: DecodeSequence, offer: KVOffer) -> None:
        """Continue the prompt's chain of keys, if the prefill worker has sealed every full block."""
        num_full, offered = (len(sequence.token_ids) - 1) // self.block_size, np.frombuffer(offer.block_ids, np.int32)
        sealed = offered[unpack_flags(offer.are_sealed, len(offered))]
        num_sealed = np.bincount(self.leases.shape.groups_of(sealed), minlength=len(self.layout.groups))
        if all(num_sealed[n] == num_full for n, group in enumerate(self.layout.groups) if group.is_append_only):
            sequence.chain = SealedChain(num_full, offer.digest)

    def begin_pulled(self, sequence: DecodeSequence, root: bytes, of_prompt: Sequence[bytes], num_found: int) -> None:
        """Seal the blocks of a pulled prompt with these digests, and continue its chain of keys.

        Args:
            root: of the chain.
            num_found: leading places whose blocks are sealed in append-only groups.
        """
        chain = sequence.chain = SealedChain(len(of_prompt), of_prompt[-1] if of_prompt else root)
        chain.latest.extend(of_prompt[-self.most_kept :] if self.most_kept else ())
        full = list(self._seen(sequence, spares=True))
        for table in sequence.tables:
            if table.group.is_append_only:
                full += map(FullBlock, table.block_ids[num_found : len(of_prompt)], of_prompt[num_found:])
        self._seal(full)

    def seal(self, sequences: Iterable[DecodeSequence]) -> None:
        """Seal blocks that the last logged tokens have made full, and windows of ended sequences.

        Call before any of them is freed. KV of all tokens before the last is written.
        """
        self._seal([each for sequence in sequences for each in self._full(sequence)])

    def seal_snapshot(self, sequence: DecodeSequence) -> None:
        """Seal the last snapshot of a sequence, if its copy is over; the sequence may go on without."""
        self._seal(list(self._snapshot(sequence)))

    def _seal(self, full: Sequence[FullBlock]) -> None:
        if full:
            self.leases.seal([each.block_id for each in full], [each.digest for each in full])

    def _full(self, sequence: DecodeSequence) -> Iterator[FullBlock]:
        """Yield the blocks of a sequence to seal."""
        chain, num_written = sequence.chain, len(sequence.token_ids) - 1
        if not (chain.digest and sequence.tables):
            return
        while (chain.num_blocks + 1) * self.block_size <= num_written:
            begin = chain.num_blocks * self.block_size
            tokens = pack_ids(sequence.token_ids[begin : begin + self.block_size])
            [digest] = digests(chain.digest, tokens, self.block_size)
            chain.add(digest, self.most_kept)
            for table in sequence.tables:
                if table.group.is_append_only:
                    yield FullBlock(table.block_ids[chain.num_blocks - 1], chain.digest)
            if is_doubling(chain.num_blocks, self.block_size):
                yield from self._seen(sequence, spares=True)
        if sequence.ended:
            yield from self._seen(sequence, spares=False)
            yield from self._snapshot(sequence)

    def _snapshot(self, sequence: DecodeSequence) -> Iterator[FullBlock]:
        """Yield the last snapshot of each state, if its copy is over: the step behind it is."""
        chain, place = sequence.chain, sequence.snapshot_place
        num_behind, is_over = chain.num_blocks - place, len(sequence.token_ids) >= place * self.block_size + 2
        sequence.snapshot_place = 0
        if place and is_over and num_behind < len(chain.latest):
            for number in self.layout.states:
                yield FullBlock(sequence.tables[number].spare[-1], chain.latest[-1 - num_behind])

    def _seen(self, sequence: DecodeSequence, *, spares: bool) -> Iterator[FullBlock]:
        """Yield the blocks of windows that the next token behind the sealed places sees, if all can be sealed.

        Args:
            spares: leave the sequence blocks to go on with.
        """
        chain, free = sequence.chain, minus(self.leases.num_free, self.reserve())
        for table, num_free in zip(sequence.tables, free, strict=True):
            if not table.group.window:
                continue
            places = needed(table.group, chain.num_blocks)
            unsealed = [place for place in places if table.block_ids[place] not in table.sealed]
            is_known = unsealed and unsealed[0] >= max(table.num_gone, chain.num_blocks - len(chain.latest))
            if is_known and not (spares and len(unsealed) > num_free):
                block_ids = [table.block_ids[place] for place in unsealed]
                table.sealed.update(block_ids)
                found = (chain.latest[place - chain.num_blocks] for place in unsealed)
                yield from map(FullBlock, block_ids, found)
