"""Absorbed attention of prompts against the reference, with one query a program and with several."""

import pytest
import torch

from common.kernels.base.latent_operands import Tiling
from common.kernels.latent import query_attention
from common.kernels.latent.query_attention import latent_query_attention
from common.ops.reference.layers import attend
from tests.kernels.conftest import AssertClose, MakePaged, gpu_at
from tests.support.latents import Dims, latent_weights


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "block_size", "dims"),
    [
        ([37, 1, 6], [37, 50, 130], 16, Dims()),
        ([3, 5, 70], [0, 5, 200], 64, Dims(3, 128, 16, 32, 16)),  # a sequence of padding
        ([9], [40], 32, Dims(20, 64, 16, 16, 16)),  # groups of heads
    ],
)
def test_equals_reference(
    query_lens: list[int],
    seq_lens: list[int],
    block_size: int,
    dims: Dims,
    queries: int,
    make_paged: MakePaged,
    assert_close: AssertClose,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, batch = make_paged(query_lens, seq_lens, block_size, 1, dims.rank + dims.rope)
    if pool.device.type == "cpu":  # the interpreter would have the tiles for fp32 alone
        tiling = Tiling(queries=queries, keys=32, num_warps=4, num_stages=1)
        monkeypatch.setattr(query_attention, "tiling_for", lambda *_: tiling)
    cache, weights = pool[:, 1, 0, :, 0], latent_weights(dims, 1, pool.device, pool.dtype)
    q = torch.randn(sum(query_lens), dims.num_heads, dims.rank + dims.rope).to(pool)
    tables = batch.block_tables[0]
    out = latent_query_attention(q, cache, weights, tables, batch.cu_seqlens, batch.seq_lens, gpu_at(q.device))
    expected, bounds = torch.zeros_like(out), batch.cu_seqlens.tolist()
    for row, seq_len in enumerate(seq_lens):
        if seq_len:
            tokens = slice(bounds[row], bounds[row + 1])
            entries = cache[tables[row, : -(-seq_len // block_size)].long()].flatten(0, 1)[:seq_len].float()
            latents = entries[:, None, : dims.rank]
            expected[tokens] = attend(q[tokens].float(), entries[:, None], latents, weights.scale).to(q.dtype)
    assert_close(out, expected)
