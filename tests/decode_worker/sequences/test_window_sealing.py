"""Blocks of windows that decoding fills: sealed where later texts resume, and only if others can take their place."""

import pytest

from common.kv.tables import BlockTable, held_by
from common.memory.client.lease_cache import LeaseCache
from common.serving.prompts.stops import FIRST_TOKENS
from common.wire.messages.memory import BlocksLeased, BlocksSealed, MemoryMessage
from common.wire.values.block_key import digests, keys_in_group, pack_keys, root_of
from common.wire.values.kv_layout import KVLayout
from common.wire.values.packing import pack_ids, unpack_ids
from common.wire.values.pool_shape import PoolShape
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sealing import Sealing
from decode_worker.sequences.sequence import DecodeSequence, SealedChain
from tests.support.allocator import BlockAllocator, check_owned
from tests.support.layouts import full, window
from tests.support.sequences import blocks_of_rows, decode_sequence

BLOCK, SEEN = 4, 9
LAYOUT = KVLayout("model", (full(1, 1, 1, BLOCK, "float32"), window(BLOCK, SEEN)))
SHAPE = PoolShape(LAYOUT, (401, 41))
ROOT = root_of(LAYOUT)


class Rig:
    """A decode worker's scheduler with a sequence that was handed over, and what is sealed of windows."""

    def __init__(self, num_tokens: int, num_at_hand: int) -> None:
        self.said: list[MemoryMessage] = []
        self.leases = LeaseCache(SHAPE, self.said.append)
        begin = SHAPE.begins[1] + 1
        at_hand = [*range(1, 401), *range(begin, begin + 4 + num_at_hand)]
        self.leases.receive(BlocksLeased(pack_ids(at_hand), pack_ids([7] * len(at_hand))))
        self.scheduler = DecodeScheduler(self.leases, 4, 5000)
        self.sealing = Sealing(self.leases, lambda: self.scheduler.capacity.num_growing)
        self.scheduler.on_end = lambda sequence: self.sealing.seal([sequence])
        self.sequence = self._handed_over(list(range(num_tokens)))

    def _handed_over(self, token_ids: list[int]) -> DecodeSequence:
        num_full, first = (len(token_ids) - 1) // BLOCK, LAYOUT.groups[1].first_seen(len(token_ids))
        blocks = self.leases.allocate((num_full + 1, num_full + 1 - first))
        tables = [BlockTable(LAYOUT.groups[0], blocks[0]), BlockTable(LAYOUT.groups[1], blocks[1], first)]
        sequence = decode_sequence("r", token_ids, 1)
        chain = [ROOT, *digests(ROOT, pack_ids(token_ids[:-1]), BLOCK)]
        sequence.chain = SealedChain(num_full, chain[num_full])
        self.scheduler.reserve(sequence, tables)
        self.scheduler.activate(sequence)
        return sequence

    def decode(self, num_tokens: int) -> None:
        """Until there are so many tokens."""
        while len(self.sequence.token_ids) < num_tokens:
            self.scheduler.slots.make()
            sequences = self.scheduler.launched()
            assert sequences, "it rests"
            self.sequence.token_ids.append(len(self.sequence.token_ids))
            self.sealing.seal(sequences)
            self.scheduler.collected(sequences)

    def places(self) -> list[int]:
        """Places of the text whose blocks of the window are sealed."""
        sealed = [message for message in self.said if isinstance(message, BlocksSealed)]
        keys = [message.keys[n : n + 16] for message in sealed for n in range(0, len(message.keys), 16)]
        ids = [block_id for message in sealed for block_id in unpack_ids(message.block_ids)]
        text = digests(ROOT, pack_ids(self.sequence.token_ids), BLOCK)
        places = {keys_in_group(pack_keys([digest]), 1): place for place, digest in enumerate(text)}
        return [places[key] for key, block_id in zip(keys, ids, strict=True) if block_id >= SHAPE.begins[1]]


@pytest.mark.parametrize("num_tokens", range(40, 49))
def test_the_last_window_of_a_reply_is_sealed_at_its_end_and_no_other(num_tokens: int) -> None:
    rig = Rig(10, 0)
    rig.decode(num_tokens)
    assert rig.places() == []
    rig.scheduler.end(rig.sequence)
    last = (num_tokens - 1) // BLOCK
    first_seen = LAYOUT.groups[1].first_seen(last * BLOCK + 1)
    assert rig.places() == list(range(first_seen, last))
    check_owned(rig.leases, [])


@pytest.mark.parametrize(("num_at_hand", "is_sealed"), [(1, False), (2, True)])
def test_a_window_is_sealed_at_a_doubling_if_blocks_are_at_hand(num_at_hand: int, is_sealed: bool) -> None:
    rig = Rig(FIRST_TOKENS - 20, num_at_hand)
    rig.decode(FIRST_TOKENS + 1)
    last = FIRST_TOKENS // BLOCK
    assert rig.places() == ([last - 2, last - 1] if is_sealed else [])
    rig.decode(FIRST_TOKENS + 2)
    check_owned(rig.leases, blocks_of_rows(rig.scheduler))


@pytest.mark.parametrize(("num_at_hand", "is_sealed"), [(1, False), (2, True)])
def test_the_window_of_a_pulled_prompt_is_sealed_if_blocks_are_at_hand(num_at_hand: int, is_sealed: bool) -> None:
    rig = Rig(30, num_at_hand)
    of_prompt = digests(ROOT, pack_ids(range(29)), BLOCK)
    rig.sealing.begin_pulled(rig.sequence, ROOT, of_prompt, num_found=4)
    assert rig.places() == ([5, 6] if is_sealed else []) and len(rig.leases.references) == 3 + 2 * is_sealed
    rig.decode(41)
    rig.scheduler.end(rig.sequence)
    assert rig.places()[-2:] == [8, 9]


def test_a_resting_sequence_gives_back_sealed_blocks_that_it_does_not_see() -> None:
    allocator = BlockAllocator(PoolShape(LAYOUT, (9, 5)))
    scheduler = DecodeScheduler(allocator, 1, 100)
    [of_full, of_window] = allocator.allocate((4, 4))
    tables = [BlockTable(LAYOUT.groups[0], of_full), BlockTable(LAYOUT.groups[1], of_window, 0, of_window)]
    sequence = decode_sequence("r", list(range(17)), 1)
    sequence.tables, sequence.num_slots = tables, 16
    scheduler.reserved[sequence.key] = sequence
    scheduler.capacity.count_row(sequence, 1)
    scheduler.activate(sequence)
    scheduler.slots.make()
    assert not len(scheduler.rows) and held_by(tables)[4:].tolist() == of_window[2:]
    scheduler.slots.make()
    assert scheduler.rows.sequences == [sequence]
    allocator.check(blocks_of_rows(scheduler))
