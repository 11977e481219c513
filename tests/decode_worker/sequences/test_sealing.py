"""Blocks that decoding fills: sealed when they are full, under the keys that their text has as a prompt."""

import pytest

from common.memory.client.lease_cache import LeaseCache
from common.wire.messages.memory import BlocksLeased, BlocksSealed, MemoryMessage
from common.wire.values.block_key import digests, pack_keys, root_of
from common.wire.values.packing import pack_ids, unpack_ids
from common.wire.values.pool_shape import PoolShape
from common.wire.values.sampling_params import SamplingParams
from decode_worker.sequences.sealing import Sealing
from decode_worker.sequences.sequence import DecodeSequence
from tests.support.allocator import check_owned
from tests.support.layouts import one_table, tiny
from tests.support.messages import kv_offer
from tests.support.sequences import decode_sequence

BLOCK = 4
LAYOUT = tiny(BLOCK)
ROOT = root_of(LAYOUT)


class Rig:
    """A leases with blocks 1 to 16, each of generation 7, and what it says."""

    def __init__(self) -> None:
        self.said: list[MemoryMessage] = []
        self.leases = LeaseCache(PoolShape(LAYOUT, (17,)), self.said.append)
        self.leases.receive(BlocksLeased(pack_ids(range(1, 17)), pack_ids([7] * 16)))
        self.sealing = Sealing(self.leases)

    def sequence(self, num_tokens: int, num_sealed: int, first: int = 100) -> DecodeSequence:
        """Of so many tokens, the last of them just sampled, as it comes from a prefill worker."""
        token_ids = list(range(first, first + num_tokens))
        [block_ids] = self.leases.allocate((4,))
        sequence = decode_sequence("r", token_ids, 1, SamplingParams(), one_table(block_ids, BLOCK))
        chain = digests(ROOT, pack_ids(token_ids), BLOCK)
        offer = kv_offer("r", block_ids, num_sealed=num_sealed, digest=([ROOT, *chain])[num_sealed])
        self.sealing.begin(sequence, offer)
        return sequence

    def step(self, *sequences: DecodeSequence) -> list[BlocksSealed]:
        """Each gets a token; what was said of blocks then."""
        for sequence in sequences:
            sequence.token_ids.append(sequence.token_ids[-1] + 1)
        self.sealing.seal(sequences)
        said = [message for message in self.said if isinstance(message, BlocksSealed)]
        self.said.clear()
        return said


@pytest.mark.parametrize("num_tokens", range(1, 10))
def test_a_block_is_sealed_when_the_token_after_its_last_is_known_and_found_as_a_prompt_would(num_tokens: int) -> None:
    rig = Rig()
    sequence = rig.sequence(num_tokens, (num_tokens - 1) // BLOCK)
    sealed = []
    while len(sequence.token_ids) < 16:
        num_before = (len(sequence.token_ids) - 1) // BLOCK
        said = rig.step(sequence)
        num_written = len(sequence.token_ids) - 1  # of the last token there is no KV yet
        assert len(said) == num_written // BLOCK - num_before
        sealed += said
    chain = digests(ROOT, pack_ids(sequence.token_ids), BLOCK)
    first = (num_tokens - 1) // BLOCK
    assert [message.keys for message in sealed] == [pack_keys([digest]) for digest in chain[first:3]]
    block_ids = [block_id for message in sealed for block_id in unpack_ids(message.block_ids)]
    assert block_ids == list(sequence.tables[0].block_ids[first:3]) and sequence.chain.num_blocks == 3


def test_those_of_one_step_are_said_at_once() -> None:
    rig = Rig()
    sequences = [rig.sequence(4, 0, first) for first in (100, 200, 300)]
    [said] = rig.step(*sequences)
    assert unpack_ids(said.block_ids) == [sequence.tables[0].block_ids[0] for sequence in sequences]
    assert unpack_ids(said.generations) == [7, 7, 7] and len(rig.leases.references) == 3
    for sequence in sequences:
        rig.leases.free(sequence.tables[0].block_ids)
    check_owned(rig.leases, [])


def test_where_its_prefill_worker_has_sealed_less_or_nothing_it_seals_nothing() -> None:
    rig = Rig()
    less = rig.sequence(10, 1)
    off = decode_sequence("s", [1, 2, 3], 1, SamplingParams(), one_table([9], BLOCK))
    rig.sealing.begin(off, kv_offer("s", [9]))
    for _ in range(12):
        assert rig.step(less, off) == []
