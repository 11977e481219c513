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
