"""Kernels of the gated delta rule against their law: prompts, steps, tokens run again, padding, poisoned states."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.kernels.base.delta_operands import DeltaWeights, Sequences
from common.kernels.delta.chunk_overlaps import find_overlaps
from common.kernels.delta.chunk_scan import scan_chunks
from common.kernels.delta.convolution import convolve
from common.kernels.delta.gated_norm import gated_norm
from common.kernels.delta.prompt_convolution import convolve_prompts
from common.kernels.delta.recurrence import recur
from common.kernels.delta.states import begin_states
from common.ops import delta_rule as law
from common.ops.base import ForwardBatch
from tests.kernels.conftest import gpu_at
from tests.support.marks import first_then

LAYER, NUM_BLOCKS = 1, 9
SIZES = [(2, 6, 16, 16), (1, 2, 12, 20)]
"""Key heads, value heads, key and value dimensions."""
ERRORS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest error, relative to the largest value."""


def weights_of(sizes: tuple[int, int, int, int], device: torch.device) -> DeltaWeights:
    num_k, num_v, key_dim, value_dim = sizes
    channels = 2 * num_k * key_dim + num_v * value_dim
    return DeltaWeights(
        conv=torch.randn(channels, 1, 4, device=device) * 0.4,
        decay=torch.rand(num_v, device=device).mul(4).add(0.1).log(),
        dt_bias=torch.randn(num_v, device=device),
        norm=torch.rand(value_dim, device=device) + 0.5,
        norm_eps=1e-6,
        num_key_heads=num_k,
        num_value_heads=num_v,
        key_dim=key_dim,
        value_dim=value_dim,
        group=0,
    )


def poisoned_states(weights: DeltaWeights, device: torch.device) -> Tensor:
    row = weights.key_dim * weights.value_dim
    num_rows = weights.num_value_heads + -(-weights.conv.shape[0] * 4 // row) + 1
    return torch.full((NUM_BLOCKS, 2, 1, 1, num_rows, row), torch.nan, device=device)


def batch_of(
    lengths: list[int], seq_lens: list[int], blocks: list[int], num_tokens: int, device: torch.device
) -> ForwardBatch:
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    none = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    return ForwardBatch(
        token_ids=none,
        positions=none,
        slots=(),
        block_tables=(torch.tensor(blocks, dtype=torch.int32, device=device)[:, None],),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        cu_seqlens=ends.to(device),
        last_tokens=None,
        max_query_len=max(lengths),
        max_seq_len=1000,
    )


def by_kernels(
    x: Tensor, weights: DeltaWeights, states: Tensor, batch: ForwardBatch, *, chunked: bool = False
) -> Tensor:
    [table] = batch.block_tables
    is_new = begin_states(states, table, batch.cu_seqlens, batch.seq_lens)
    sequences = Sequences(table, batch.cu_seqlens, batch.seq_lens, is_new, batch.one_token_each)
    layer = states[:, LAYER, 0, 0]
    if batch.one_token_each:
        heads, gates = convolve(x, weights, layer, sequences)
    else:
        heads, gates = convolve_prompts(x, weights, layer, sequences)
    if chunked and not batch.one_token_each:
        overlaps = find_overlaps(heads, gates, weights, sequences)
        out = scan_chunks(heads, overlaps, weights, layer, sequences, gpu_at(x.device))
    else:
        out = recur(heads, gates, weights, layer, sequences)
    return gated_norm(out, x, weights, sequences)


def by_law(x: Tensor, weights: DeltaWeights, states: Tensor, batch: ForwardBatch) -> Tensor:
    [table] = batch.block_tables
    is_new = law.begin_states(states, table, batch)
    return law.delta_rule(x, weights, states[:, LAYER, 0, 0], table, batch, is_new)


def assert_near(out: Tensor, expected: Tensor, error: float) -> None:
    assert (out.float() - expected.float()).abs().max() <= error * expected.float().abs().max()


STEPS = [  # lengths, seq_lens, tokens of padding behind them
    ([7, 18, 1], [7, 18, 1], 2),
    ([2, 5, 35], [9, 23, 36], 0),
    ([1, 1, 1], [10, 24, 37], 0),
    ([1, 1, 1], [10, 0, 38], 0),  # the first again, the second is padding
    ([1, 1, 1], [11, 25, 38], 0),  # the last again
    ([1, 0, 3], [12, 0, 41], 2),
]


@pytest.mark.parametrize("chunked", [True, False], ids=["chunks", "recurrence"])
@pytest.mark.parametrize("sizes", first_then(pytest.mark.medium, reversed(SIZES)), ids=str)
def test_prompts_steps_and_tokens_run_again(
    sizes: tuple[int, int, int, int], chunked: bool, device: torch.device, dtype: torch.dtype
) -> None:
    if chunked and device.type == "cuda" and dtype == torch.float32:
        pytest.skip("a GPU computes fp32 token after token")
    torch.manual_seed(3)
    weights = weights_of(sizes, device)
    ours, theirs = (poisoned_states(weights, device) for _ in range(2))
    blocks = [7, 2, 5]
    for lengths, seq_lens, num_padding in STEPS:
        num_tokens = sum(lengths) + num_padding
        x = torch.randn(num_tokens, weights.conv.shape[0] + weights.value_width + 2 * weights.num_value_heads)
        x[sum(lengths) :] = torch.nan
        x = x.to(device, dtype)
        batch = batch_of(lengths, seq_lens, blocks, num_tokens, device)
        out, expected = by_kernels(x, weights, ours, batch, chunked=chunked), by_law(x, weights, theirs, batch)
        assert torch.isfinite(out).all()
        assert out.dtype == dtype
        real = torch.cat([torch.full((n,), bool(s)) for n, s in zip(lengths, seq_lens, strict=True)]).to(device)
        assert_near(out[: len(real)][real], expected[: len(real)][real], ERRORS[dtype])
        assert not out[len(real) :].any(), "padding gives 0"
    assert torch.equal(ours.isnan(), theirs.isnan()), "nothing but the sequences' own states is written"
    kept = ~theirs.isnan()
    assert_near(ours[kept], theirs[kept], ERRORS[dtype])


def test_a_chunked_law_is_the_recurrence_in_float64() -> None:
    torch.manual_seed(4)
    q, k, v = (torch.randn(150, 3, 8, dtype=torch.float64) for _ in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    decay, beta = -torch.rand(150, 3, dtype=torch.float64) * 3, torch.rand(150, 3, dtype=torch.float64)
    state = start = torch.randn(3, 8, 8, dtype=torch.float64)
    outputs = []
    for t in range(150):
        state = state * decay[t].exp()[:, None, None]
        change = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + change[:, :, None] * k[t][:, None]
        outputs.append(torch.einsum("hvk,hk->hv", state, q[t]))
    out, end = law.advance(q, k, v, decay, beta, start)
    torch.testing.assert_close(out, torch.stack(outputs), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(end, state, rtol=1e-10, atol=1e-12)


def test_a_token_run_again_has_the_output_of_before_and_changes_nothing(device: torch.device) -> None:
    torch.manual_seed(5)
    weights = weights_of(SIZES[0], device)
    states = poisoned_states(weights, device)
    width = weights.conv.shape[0] + weights.value_width + 2 * weights.num_value_heads
    by_kernels(torch.randn(5, width, device=device), weights, states, batch_of([5], [5], [4], 5, device))
    x, batch = torch.randn(1, width, device=device), batch_of([1], [6], [4], 1, device)
    first = by_kernels(x, weights, states, batch)
    before = states.clone()
    torch.testing.assert_close(by_kernels(x, weights, states, batch), first, rtol=1e-4, atol=1e-5)
    assert torch.equal(states.nan_to_num(7.0), before.nan_to_num(7.0))
    moved = replace(batch, seq_lens=batch.seq_lens + 1)
    assert not torch.allclose(by_kernels(x, weights, states, moved), first, rtol=1e-2)
