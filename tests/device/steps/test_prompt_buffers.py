"""What a prompt step is told of blocks of several groups: each table counts from its group's first block."""

import torch

from common.device.steps.prompt_buffers import PromptBuffers, PromptChunk
from common.kv.tables import NO_BLOCK, tables_of
from common.wire.values.kv_layout import KVLayout
from common.wire.values.pool_shape import PoolShape
from common.wire.values.sampling_params import SamplingParams
from tests.support.allocator import BlockAllocator
from tests.support.layouts import full, latent, state, window

LAYOUT = KVLayout("model", (full(1, 1, 1, 4, "float32"), window(2, 5), state(3), latent(8)))
SHAPE = PoolShape(LAYOUT, (20, 15, 4, 9))
BUDGET, MAX_LEN = 6, 40


def test_tables_of_all_groups_lie_side_by_side_as_the_host_has_them() -> None:
    allocator = BlockAllocator(SHAPE)
    buffers = PromptBuffers(2 * BUDGET, 3, MAX_LEN, SHAPE, 100, torch.device("cpu"))
    sequences = [
        tables_of(LAYOUT, allocator.allocate(LAYOUT.most_blocks(num_tokens, BUDGET))) for num_tokens in (MAX_LEN, 18)
    ]
    for start in (0, 6, 12):
        chunks = []
        for tables in sequences:
            for table in tables:
                table.extend(start + 1, start + BUDGET)
            block_ids = [table.block_ids for table in tables]
            chunks.append(PromptChunk([7] * BUDGET, start, block_ids, SamplingParams(), is_last=False))
        buffers.fill(chunks, 2 * BUDGET, 3)
        batch = buffers.forward_batch(2 * BUDGET, 3, max_query_len=BUDGET, max_seq_len=MAX_LEN, num_keys=0)
        assert [table.shape for table in batch.block_tables] == [(3, 10), (3, 20), (3, 1), (3, 5)]
        for row, tables in enumerate(sequences):
            for table, told, begin in zip(tables, batch.block_tables, SHAPE.begins, strict=True):
                wanted = [NO_BLOCK if block_id == NO_BLOCK else block_id - begin for block_id in table.block_ids]
                assert told[row, : len(wanted)].tolist() == wanted
                most = SHAPE.num_bytes // table.group.block_bytes
                assert all(0 < block < most for block in wanted[table.num_gone :])
        for number, (group, first) in enumerate(zip(LAYOUT.groups, SHAPE.begins, strict=True)):
            size = group.block_size
            slots = [
                (tables[number].block_ids[position // size if group.grows else 0] - first) * size + position % size
                for tables in sequences
                for position in range(start, start + BUDGET)
            ]
            assert batch.slots[number].tolist() == slots
    assert [table.num_gone for table in sequences[0]] == [0, 3, 0, 0], "the window has used three blocks again"
