"""Absorbed attention of one token a sequence against the reference, and the same to the bit in any company."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.kernels.attention.decode_division import divide, limits_for
from common.kernels.attention.decode_parts import make_workspace
from common.kernels.base.latent_operands import LatentWeights
from common.kernels.latent.decode_attention import latent_decode_attention, num_groups
from common.ops.base import ForwardBatch
from common.ops.reference.layers import attend as attend_by_law
from tests.kernels.conftest import AssertClose, MakePaged, gpu_at
from tests.support.latents import Dims, latent_weights


def attend(q: Tensor, cache: Tensor, weights: LatentWeights, batch: ForwardBatch, num_slots: int) -> Tensor:
    """Attend with contexts divided for `num_slots` programs."""
    groups = num_groups(weights.num_heads)
    limits = limits_for(len(q), groups, num_slots)
    return latent_decode_attention(
        q=q,
        cache=cache,
        weights=weights,
        block_tables=batch.block_tables[0],
        seq_lens=batch.seq_lens,
        division=divide(batch.seq_lens, groups, num_slots, num_layers=2),
        workspace=make_workspace(limits.max_joins + 1, weights.num_heads, groups, weights.rank, q.device),
        layer_id=1,
        gpu=gpu_at(q.device),
    )


def expected(q: Tensor, cache: Tensor, weights: LatentWeights, batch: ForwardBatch) -> Tensor:
    """Return weighted sums of latents, by the law."""
    out = torch.zeros_like(q[..., : weights.rank])
    for row, seq_len in enumerate(batch.seq_lens.tolist()):
        blocks = batch.block_tables[0][row, : -(-seq_len // cache.shape[1])].long()
        entries = cache[blocks].flatten(0, 1)[:seq_len].float().unsqueeze(1)
        if seq_len:
            values = entries[..., : weights.rank]
            out[row] = attend_by_law(q[row : row + 1].float(), entries, values, weights.scale)[0].to(q.dtype)
    return out


def test_heads_are_divided_into_equal_groups() -> None:
    assert [num_groups(heads) for heads in (1, 16, 17, 32, 40, 64, 128)] == [1, 1, 17, 2, 4, 4, 8]


@pytest.mark.parametrize("num_slots", [1, 4, 132])  # the more programs, the more contexts are cut
@pytest.mark.parametrize(
    ("seq_lens", "block_size", "dims"),
    [
        ([64, 0, 65, 1], 16, Dims()),  # a row of padding among others
        ([700], 32, Dims(20, 64, 16, 16, 16)),  # groups of heads
        ([130, 300], 64, Dims(3, 128, 16, 32, 16)),
        ([0, 0, 0], 16, Dims()),
    ],
)
def test_equals_reference(
    seq_lens: list[int], block_size: int, dims: Dims, num_slots: int, make_paged: MakePaged, assert_close: AssertClose
) -> None:
    pool, batch = make_paged([1] * len(seq_lens), seq_lens, block_size, 1, dims.rank + dims.rope)
    cache, weights = pool[:, 1, 0, :, 0], latent_weights(dims, 1, pool.device, pool.dtype)
    q = torch.randn(len(seq_lens), dims.num_heads, dims.rank + dims.rope).to(pool)
    out = attend(q, cache, weights, batch, num_slots)
    assert_close(out, expected(q, cache, weights, batch))
    assert (out[batch.seq_lens == 0] == 0).all()


@pytest.mark.medium
def test_a_sequence_has_the_same_bits_in_any_company(make_paged: MakePaged) -> None:
    """Alone and cut to the last part, or whole among many."""
    seq_lens, dims = [700, 64, 3000, 65, 1, 0, 2049, 128], Dims()
    pool, batch = make_paged([1] * len(seq_lens), seq_lens, 16, 1, dims.rank + dims.rope)
    cache, weights = pool[:, 1, 0, :, 0], latent_weights(dims, 1, pool.device, pool.dtype)
    q = torch.randn(len(seq_lens), dims.num_heads, dims.rank + dims.rope).to(pool)
    together = attend(q, cache, weights, batch, 1)
    for row in range(len(seq_lens)):
        tables, lens = batch.block_tables[0][row : row + 1], batch.seq_lens[row : row + 1]
        alone = replace(batch, block_tables=(tables,), seq_lens=lens)
        assert torch.equal(attend(q[row : row + 1], cache, weights, alone, 132), together[row : row + 1])
    assert torch.equal(attend(q, cache, weights, batch, 4), together)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [16, 64, 128])
@pytest.mark.parametrize("num_seqs", [1, 3, 64, 256])
def test_full_size_equals_reference(
    num_seqs: int, num_heads: int, make_paged: MakePaged, assert_close: AssertClose
) -> None:
    seq_lens = [int(n) for n in torch.randint(0, 500, (num_seqs,))]
    seq_lens[0], dims = 9001, Dims(num_heads, 512, 128, 64, 128)
    pool, batch = make_paged([1] * num_seqs, seq_lens, 16, 1, 576)
    cache, weights = pool[:, 1, 0, :, 0], latent_weights(dims, 1, pool.device, pool.dtype)
    q = torch.randn(num_seqs, num_heads, 576).to(pool)
    assert_close(attend(q, cache, weights, batch, 132), expected(q, cache, weights, batch))
