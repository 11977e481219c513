"""Gathered latents, and attention of prompts over expanded keys and values, against the reference."""

import pytest
import torch

from common.kernels.latent.gather_latents import TILE, gather_latents
from common.kernels.latent.prompt_attention import latent_prompt_attention
from common.ops import reference
from tests.kernels.conftest import AssertClose, MakePaged, gpu_at
from tests.support.latents import Dims, latent_weights


@pytest.mark.parametrize("spare", [0, 100])  # keys that the host counts beyond those there are
def test_gathers_into_tiles_with_zeros_behind(spare: int, make_paged: MakePaged) -> None:
    seq_lens = [70, 1, 0, 64, 130]
    pool, batch = make_paged([1, 1, 1, 1, 1], seq_lens, 16, 1, 80)
    cache = pool[:, 1, 0, :, 0]
    out = gather_latents(cache, batch.block_tables[0], batch.seq_lens, sum(seq_lens) + spare)
    expected, before = torch.zeros_like(out), 0
    for row, seq_len in enumerate(seq_lens):
        blocks = batch.block_tables[0][row, : -(-seq_len // 16)].long()
        begin = (before // TILE + row) * TILE
        expected[begin : begin + seq_len] = cache[blocks].flatten(0, 1)[:seq_len]
        before += seq_len
    assert torch.equal(out, expected)


@pytest.mark.parametrize("heads_at_once", [1, 4])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "dims"),
    [
        ([37, 1, 100], [37, 50, 130], Dims()),
        ([3, 5, 70], [0, 5, 200], Dims(4, 64, 16, 16, 32)),  # a sequence of padding
    ],
)
def test_equals_reference(
    query_lens: list[int],
    seq_lens: list[int],
    dims: Dims,
    heads_at_once: int,
    make_paged: MakePaged,
    assert_close: AssertClose,
) -> None:
    pool, batch = make_paged(query_lens, seq_lens, 16, 1, dims.rank + dims.rope)
    cache, table = pool[:, 1, 0, :, 0], batch.block_tables[0]
    weights = latent_weights(dims, 1, pool.device, pool.dtype)
    q = torch.randn(sum(query_lens), dims.num_heads, dims.nope + dims.rope).to(pool)
    entries = gather_latents(cache, table, batch.seq_lens, sum(seq_lens))
    out = torch.empty((sum(query_lens), dims.num_heads, dims.value), dtype=q.dtype, device=q.device)
    for first in range(0, dims.num_heads, heads_at_once):
        some = weights.expand[first : first + heads_at_once]
        latent_prompt_attention(
            q=q,
            entries=entries,
            expanded=torch.einsum("kr,hdr->khd", entries[:, : dims.rank], some).contiguous(),
            weights=weights,
            cu_seqlens=batch.cu_seqlens,
            seq_lens=batch.seq_lens,
            max_query_len=max(query_lens),
            gpu=gpu_at(q.device),
            out=out,
            first_head=first,
        )
    assert_close(out, reference.latent_attention(q, cache, table, batch, weights, is_absorbed=False))
