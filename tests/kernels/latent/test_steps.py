"""Latent attention as steps use it, against the law: a prompt in chunks of either form, then tokens one by one."""

import itertools
from dataclasses import replace

import pytest
import torch

from common.ops import cuda_latent, latent_rows
from common.ops.base import ForwardBatch, GroupCache
from common.ops.cuda_latent import CudaLatent
from common.ops.torch_ops import TorchOps
from common.settings.config import KernelsSection
from tests.kernels.conftest import AssertClose, gpu_at
from tests.support.latents import Dims, latent_weights

BLOCK_SIZE, NUM_BLOCKS, LAYERS = 8, 30, 2
DIMS = Dims(4, 64, 32, 16, 16)
STEPS = [
    [(0, 40), (0, 3)],  # expanded
    [(40, 44), (3, 5)],  # few tokens
    [(44, 70), (5, 60)],  # expanded, with keys computed before
    [(70, 71), (60, 61)],
    [(71, 72), (0, 0)],  # a row of padding
]


def make_batch(chunks: list[tuple[int, int]], tables: torch.Tensor, *, counts_keys: bool) -> ForwardBatch:
    """Tokens [begin, end) of each sequence; a chunk (0, 0) is a row of padding with one token."""
    spans = [(begin, end) if end else (0, 1) for begin, end in chunks]
    lengths = [end - begin for begin, end in spans]
    positions = torch.cat([torch.arange(begin, end) for begin, end in spans])
    rows = torch.arange(len(chunks)).repeat_interleave(torch.tensor(lengths))
    slots = tables.cpu()[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    ends = torch.tensor([end for _, end in chunks])
    slots[ends[rows] == 0] = -1
    return ForwardBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int32, device=tables.device),
        positions=positions.int().to(tables.device),
        slots=(slots.to(tables.device),),
        block_tables=(tables,),
        seq_lens=ends.int().to(tables.device),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int().to(tables.device),
        last_tokens=(torch.tensor(lengths).cumsum(0) - 1).to(tables.device),
        max_query_len=max(lengths),
        max_seq_len=max(end for _, end in chunks),
        num_keys=int(ends.sum()) if counts_keys else 0,
    )


@pytest.mark.parametrize(
    "changed", [{}, {"rope": "torch"}, {"prefill_attention": "torch", "decode_attention": "torch"}]
)
@pytest.mark.parametrize("counts_keys", [True, False])  # without, no keys are expanded
@pytest.mark.parametrize("of_last", [False, True])
def test_equals_the_law(
    of_last: bool,
    counts_keys: bool,
    changed: dict[str, str],
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_latent, "FEW_TOKENS", 10)
    monkeypatch.setattr(cuda_latent, "EXPANDED_BYTES", 40_000)
    monkeypatch.setattr(latent_rows, "ROWS_AT_ONCE", 4)
    for module in (cuda_latent, latent_rows):
        monkeypatch.setattr(module, "gpu_of", gpu_at)
    weights = latent_weights(DIMS, 100, device, dtype, has_factors=True)
    width = DIMS.rank + DIMS.rope
    caches = [
        torch.full((NUM_BLOCKS, LAYERS, 1, BLOCK_SIZE, 1, width), torch.nan, dtype=dtype, device=device)
        for _ in range(2)
    ]
    group = CudaLatent(GroupCache(caches[0], DIMS.num_heads), KernelsSection(**changed), 2, pdl=False)  # type: ignore[arg-type]
    law = TorchOps([GroupCache(caches[1], DIMS.num_heads)])
    tables = torch.randperm(NUM_BLOCKS)[:24].view(2, 12).int().to(device)
    for chunks, layer_id in itertools.product(STEPS, range(LAYERS)):
        batch = make_batch(chunks, tables, counts_keys=counts_keys)
        inputs = torch.randn(batch.token_ids.shape[0], DIMS.num_heads * 48 + width).to(device, dtype)
        q, kv = inputs[:, :-width], inputs[:, -width:]
        expected = law.latent_attention(q, kv, weights, layer_id, batch)
        batch = replace(batch, work=(group.divide(batch, 0),))
        if of_last and not batch.one_token_each:
            out, expected = group.attend_last(q, kv, weights, layer_id, batch), expected[batch.last_tokens]
        else:
            out = group.attend(q, kv, weights, layer_id, batch)
        kept = batch.seq_lens > 0 if out.shape[0] == len(chunks) else slice(None)
        assert_close(out[kept], expected[kept])
        written = ~caches[1].isnan()
        assert torch.equal(written, ~caches[0].isnan())
        assert_close(caches[0][written], caches[1][written])
