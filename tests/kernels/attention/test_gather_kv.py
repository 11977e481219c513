"""K and V out of their blocks: every key at its row, and nothing but zeros beside it in its tiles."""

import pytest
import torch

from common.kernels.attention.gather_kv import TILE, gather_kv
from tests.kernels.conftest import MakePaged


@pytest.mark.parametrize(
    ("seq_lens", "block_size", "num_kv", "head_dim"),
    [
        ([1], 16, 1, 64),
        ([128], 16, 2, 64),
        ([129, 127], 32, 1, 64),
        ([60, 300, 1, 256, 0, 90], 16, 2, 64),
        ([300, 0], 64, 3, 32),  # a width that is no power of two
        ([17] * 66, 16, 1, 64),  # more sequences than lanes of most batches
    ],
)
@pytest.mark.parametrize("unused_keys", [0, 200])
def test_every_key_has_its_row(
    seq_lens: list[int], block_size: int, num_kv: int, head_dim: int, unused_keys: int, make_paged: MakePaged
) -> None:
    pool, batch = make_paged([1] * len(seq_lens), seq_lens, block_size, num_kv, head_dim)
    k_cache, v_cache = pool[:, 1, 0], pool[:, 1, 1]
    count = torch.tensor([7], dtype=torch.int32, device=pool.device)
    num_keys = sum(seq_lens) + unused_keys
    kv = gather_kv(k_cache, v_cache, batch.block_tables[0], batch.seq_lens, num_keys, zeroed=count)
    assert count.item() == 0
    assert kv.shape[2] == num_kv * head_dim
    keys_before = 0
    for seq, seq_len in enumerate(seq_lens):
        begin = (keys_before // TILE + seq) * TILE
        end = begin + -(-seq_len // TILE) * TILE
        blocks = batch.block_tables[0][seq, : -(-seq_len // block_size)].long()
        for rows, cache in zip(kv, (k_cache, v_cache), strict=True):
            assert torch.equal(rows[begin : begin + seq_len], cache[blocks].flatten(0, 1)[:seq_len].flatten(1))
            assert not rows[begin + seq_len : end].any()
        keys_before += seq_len


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("window", [1, 40, 128, 300])
def test_keys_out_of_sight_are_left_out(window: int, tile: int, make_paged: MakePaged) -> None:
    query_lens, seq_lens, block_size = [1, 20, 5, 70], [700, 150, 0, 70], 16
    pool, batch = make_paged(query_lens, seq_lens, block_size, 2, 32, window)
    k_cache, v_cache = pool[:, 1].unbind(1)
    count = torch.tensor([7], dtype=torch.int32, device=pool.device)
    firsts = [max(length - queries + 1 - window, 0) for length, queries in zip(seq_lens, query_lens, strict=True)]
    lens = [length - first // tile * tile for length, first in zip(seq_lens, firsts, strict=True)]
    lengths, tables = (batch.seq_lens, sum(lens)), batch.block_tables[0]
    kv = gather_kv(
        k_cache, v_cache, tables, *lengths, tile=tile, window=window, cu_seqlens=batch.cu_seqlens, zeroed=count
    )
    for seq, (seq_len, first) in enumerate(zip(seq_lens, firsts, strict=True)):
        begin = (sum(lens[:seq]) // tile + seq) * tile - first // tile * tile  # row of key 0
        end = begin + -(-seq_len // tile) * tile
        blocks = tables[seq, first // block_size : -(-seq_len // block_size)].long()
        skipped = first // block_size * block_size
        for rows, cache in zip(kv, (k_cache, v_cache), strict=True):
            expected = cache[blocks].flatten(0, 1)[first - skipped : seq_len - skipped].flatten(1)
            assert torch.equal(rows[begin + first : begin + seq_len], expected)
            assert not rows[begin + first // tile * tile : begin + first].any()
            assert not rows[begin + seq_len : end].any()
