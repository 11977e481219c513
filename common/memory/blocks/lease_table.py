"""Right to write each block of a pool, by lease: state, client and generation of the block.

Every lease of a block is a new generation. A message about a block names the generation, and a message about an earlier
generation is refused. So no block has two writers: a LEASED block has a single client, other blocks have none.
"""

from collections import Counter
from enum import IntEnum
from typing import NamedTuple, NoReturn

import numpy as np

from common.memory.blocks.answers import ProtocolError
from common.memory.blocks.readers import NONE_NAMED, Named, Readers, named
from common.wire.values.fields import MAX_INT32

NOBODY = -1


class BlockState(IntEnum):
    """State of a block."""

    FREE = 0
    LEASED = 1
    OFFERED = 2
    QUARANTINED = 3
    SEALED = 4


class Claim(NamedTuple):
    """State of a block, and its client."""

    state: BlockState
    client: int  # target if OFFERED; last holder if QUARANTINED


FREE = Claim(BlockState.FREE, NOBODY)
SEALED = Claim(BlockState.SEALED, NOBODY)
STATE_BITS = 3


class Holding(NamedTuple):
    """Blocks of a message that a client holds."""

    leased: np.ndarray  # [num_leased] intp
    sealed: Named


class LeaseTable:
    """Claims and generations of all blocks of a pool.

    Args:
        readers: clients that read sealed blocks.
    """

    def __init__(self, num_ids: int, readers: Readers) -> None:
        self.readers = readers
        self.generation = np.zeros(num_ids, np.int32)  # latest, by block
        self._codes = np.full(num_ids, _code(*FREE), np.int64)  # claims as numbers, to compare many at once
        self.num_leased: Counter[int] = Counter()  # by client

    def claim(self, block_id: int) -> Claim:
        """Return state and client of a block."""
        client, state = divmod(int(self._codes[block_id]), 1 << STATE_BITS)
        return Claim(BlockState(state), client)

    def claimed_by(self, client: int) -> np.ndarray:
        """Return blocks claimed by the client, in any state: [num_claimed] intp."""
        return np.flatnonzero(self._codes >> STATE_BITS == client)

    def in_state(self, state: BlockState) -> np.ndarray:
        """Return all blocks in a state: [num_blocks] intp."""
        return np.flatnonzero(self._codes & ((1 << STATE_BITS) - 1) == state)

    def holds(self, client: int) -> bool:
        """Tell whether a client holds blocks, to write or to read."""
        return self.num_leased[client] > 0 or self.readers.num_of_client[client] > 0

    def begin(self, client: int, block_ids: np.ndarray) -> None:
        """Lease free blocks, [num_blocks] intp, as a new generation."""
        self.generation[block_ids] = self.generation[block_ids] % MAX_INT32 + 1
        self.grant(client, block_ids)

    def grant(self, client: int, block_ids: np.ndarray) -> None:
        """Give blocks, [num_blocks] intp, of an unchanged generation to a client."""
        self.set(block_ids, BlockState.LEASED, client)
        self.num_leased[client] += len(block_ids)

    def end(self, client: int, block_ids: np.ndarray, state: BlockState, other: int = NOBODY) -> None:
        """End a client's leases of blocks, [num_blocks] intp; their claim is `state`, for the `other` client."""
        self.set(block_ids, state, other)
        self.num_leased[client] -= len(block_ids)

    def set(self, block_ids: np.ndarray, state: BlockState, client: int = NOBODY) -> None:
        """Set the claim of blocks: [num_blocks] intp."""
        self._codes[block_ids] = _code(state, client)

    def checked(self, client: int, block_ids: np.ndarray, generations: np.ndarray) -> Holding:
        """Split blocks into leased and sealed blocks.

        Raises ProtocolError unless the client holds all blocks by these generations. A leased block may be named once,
        a sealed block as often as the client reads the block.
        """
        try:
            codes = self._codes[block_ids]
        except IndexError:
            raise ProtocolError(f"block {block_ids.max()} of a pool of {len(self._codes)}") from None
        leased, sealed = block_ids, NONE_NAMED
        are_leased = codes == _code(BlockState.LEASED, client)
        num_others = len(block_ids) - np.count_nonzero(are_leased)
        if num_others:
            are_sealed = codes == _code(*SEALED)
            num_others -= np.count_nonzero(are_sealed)
            leased, sealed = block_ids[are_leased], named(block_ids[are_sealed])
        if num_others or self.generation[block_ids].tobytes() != generations.tobytes():
            self._refuse(client, block_ids, generations)
        if len(set(leased.tolist())) != len(leased):
            raise ProtocolError("a block is named twice")
        if sealed.total and not self.readers.reads(client, sealed):
            raise ProtocolError("a block is sealed, and it does not read it so often")
        return Holding(leased, sealed)

    def _refuse(self, client: int, block_ids: np.ndarray, generations: np.ndarray) -> NoReturn:
        """Raise ProtocolError for the first block not held by the client with its generation."""
        for block_id, generation in zip(block_ids.tolist(), generations.tolist(), strict=True):
            claim = self.claim(block_id)
            if claim not in (SEALED, (BlockState.LEASED, client)):
                raise ProtocolError(f"block {block_id} is {claim.state.name}, and not its own")
            if (lease := int(self.generation[block_id])) != generation:
                raise ProtocolError(f"block {block_id} is of generation {lease}, not {generation}")
        raise AssertionError("all are its own")


def _code(state: BlockState, client: int) -> int:
    return client << STATE_BITS | state
