"""Chunked gated delta rule against the recurrence in float64: lengths around chunks and blocks, gates of all strengths.

The interpreter's fp32 is compared at 1e-4; on a GPU, bf16 and fp16 at their own rounding. A GPU computes fp32 token
after token.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from common.kernels.base.delta_operands import DeltaWeights, Sequences
from common.kernels.delta.chunk_overlaps import CHUNK, find_overlaps
from common.kernels.delta.chunk_scan import scan_chunks
from common.kernels.delta.recurrence import recur
from tests.kernels.conftest import gpu_at

ERRORS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest error, relative to the largest value."""
GATES = {  # decay of a token as a logarithm, beta
    "any": lambda n: (-torch.rand(n) * 3, torch.rand(n)),
    "forgets": lambda n: (torch.full((n,), -30.0), torch.rand(n)),
    "keeps": lambda n: (-torch.rand(n) * 1e-3, torch.rand(n)),
    "forgets at times": lambda n: (torch.where(torch.rand(n) < 0.1, -30.0, -0.01), torch.rand(n)),
    "hardly writes": lambda n: (-torch.rand(n), torch.rand(n) * 1e-4),
    "overwrites": lambda n: (-torch.rand(n) * 1e-2, 1 - torch.rand(n) * 1e-4),
}


@pytest.fixture(autouse=True)
def _by_chunks_only(request: pytest.FixtureRequest) -> None:
    if "target" in request.fixturenames and request.getfixturevalue("target") == ("cuda", torch.float32):
        pytest.skip("a GPU computes fp32 token after token")


class Step(NamedTuple):
    """Operands of a step as `convolve_prompts` leaves them."""

    heads: Tensor  # [num_tokens, 2 * key_heads + value_heads, dim]
    gates: Tensor  # [num_tokens, value_heads, 2]
    weights: DeltaWeights
    states: Tensor  # [num_blocks, num_rows, dim * dim]
    sequences: Sequences


def make_step(
    lengths: list[int],
    seen: list[int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    gates: str = "any",
    equal_keys: bool = False,
    num_heads: tuple[int, int] = (1, 2),
    dim: int = 16,
    is_new: list[bool] | None = None,
) -> Step:
    """Make a step of sequences whose states have seen `seen` tokens; padding and states without tokens are NaN."""
    num_k, num_v = num_heads
    num_tokens, num_padding = sum(lengths), 3
    heads = torch.randn(num_tokens + num_padding, 2 * num_k + num_v, dim)
    if equal_keys:
        heads[:, num_k : 2 * num_k] = heads[0, num_k : 2 * num_k]
    heads[:, : 2 * num_k] /= heads[:, : 2 * num_k].norm(dim=-1, keepdim=True)
    decay, beta = GATES[gates]((num_tokens + num_padding) * num_v)
    both = torch.stack((decay, beta), dim=-1).view(-1, num_v, 2)
    heads[num_tokens:], both[num_tokens:] = torch.nan, torch.nan
    blocks = torch.randperm(2 * len(lengths))[: len(lengths)]
    states = torch.full((2 * len(lengths), num_v + 2, dim * dim), torch.nan)
    for block, count in zip(blocks, seen, strict=True):
        if count:
            states[block, :num_v] = torch.randn(num_v, dim * dim)
    sequences = Sequences(
        block_table=blocks.int()[:, None].to(device),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int().to(device),
        seq_lens=torch.tensor([a + b if a else 0 for a, b in zip(lengths, seen, strict=True)]).int().to(device),
        is_new=torch.tensor(is_new or [True] * len(lengths)).to(device),
        one_token_each=False,
    )
    none = torch.zeros(0)
    weights = DeltaWeights(
        conv=none, decay=none, dt_bias=none, norm=none, norm_eps=1e-6, num_key_heads=num_k, num_value_heads=num_v,
        key_dim=dim, value_dim=dim, group=0,
    )  # fmt: skip
    return Step(heads.to(device, dtype), both.to(device), weights, states.to(device), sequences)


def by_chunks(step: Step) -> tuple[Tensor, Tensor]:
    """Return outputs of real tokens, and the states after the step."""
    heads, gates, weights, before, sequences = step
    states = before.clone()
    overlaps = find_overlaps(heads, gates, weights, sequences)
    out = scan_chunks(heads, overlaps, weights, states, sequences, gpu_at(heads.device))
    return out[: int(sequences.cu_seqlens[-1])], states


def in_float64(step: Step) -> tuple[Tensor, Tensor]:
    """Do `by_chunks` token after token."""
    heads, gates, weights, before, sequences = step
    heads, gates, states = heads.double().cpu(), gates.double().cpu(), before.double().cpu()
    num_k, num_v = weights.num_key_heads, weights.num_value_heads
    q, k, v = heads.split([num_k, num_k, num_v], dim=1)
    q, k = (each.repeat_interleave(num_v // num_k, dim=1) for each in (q, k))
    bounds, outputs = sequences.cu_seqlens.tolist(), []
    for seq, block in enumerate(sequences.block_table[:, 0].tolist()):
        begin, end = bounds[seq], bounds[seq + 1]
        state = states[block, :num_v].view(num_v, weights.value_dim, weights.key_dim)
        if int(sequences.seq_lens[seq]) == end - begin:
            state = torch.zeros_like(state)
        for t in range(begin, end):
            if sequences.is_new[seq]:
                state = state * gates[t, :, 0].exp()[:, None, None]
                change = gates[t, :, 1, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
                state = state + change[:, :, None] * k[t][:, None]
            outputs.append(torch.einsum("hvk,hk->hv", state, q[t]))
        if begin < end:
            states[block, :num_v] = state.flatten(1)
    return torch.stack(outputs), states


def assert_equal(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    for each, expected in zip(ours, theirs, strict=True):
        each, expected = each.double().cpu(), expected.double().cpu()
        assert torch.equal(each.isnan(), expected.isnan()), "nothing but the sequences' own states is written"
        error = (each - expected).nan_to_num().abs().max()
        assert error <= ERRORS[dtype] * expected.nan_to_num().abs().max(), float(error)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 127, 130, 200])
def test_a_sequence_of_any_length(length: int, device: torch.device, dtype: torch.dtype) -> None:
    step = make_step([length], [length % 3], device, dtype)
    assert_equal(by_chunks(step), in_float64(step), dtype)


@pytest.mark.parametrize("equal_keys", [False, True])
@pytest.mark.parametrize("gates", GATES)
def test_gates_of_any_strength(gates: str, equal_keys: bool, device: torch.device, dtype: torch.dtype) -> None:
    step = make_step([130], [5], device, dtype, gates=gates, equal_keys=equal_keys)
    assert_equal(by_chunks(step), in_float64(step), dtype)


@pytest.mark.parametrize(
    ("lengths", "seen", "num_heads"),
    [
        ([65, 1], [0, 9], (2, 6)),
        ([3, 64, 70], [0, 0, 7], (1, 3)),
        ([0, 1, 0, 63, 2], [0, 4, 0, 1, 0], (2, 2)),
    ],
)
def test_ragged_sequences(
    lengths: list[int], seen: list[int], num_heads: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> None:
    step = make_step(lengths, seen, device, dtype, num_heads=num_heads)
    assert_equal(by_chunks(step), in_float64(step), dtype)


def test_heads_of_a_model(device: torch.device, dtype: torch.dtype) -> None:
    step = make_step([130, 20], [0, 3], device, dtype, num_heads=(1, 3), dim=128)
    assert_equal(by_chunks(step), in_float64(step), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [(16, 32), (16, 48)], ids=str)
def test_long_prompts_of_a_model(num_heads: tuple[int, int], cuda: torch.device) -> None:
    step = make_step([1, 900, 64], [70, 0, 5], cuda, torch.bfloat16, num_heads=num_heads, dim=128)
    assert_equal(by_chunks(step), in_float64(step), torch.bfloat16)


def test_results_do_not_depend_on_the_batch(device: torch.device, dtype: torch.dtype) -> None:
    together = make_step([9, 70], [0, 4], device, dtype)
    heads, gates, weights, states, sequences = together
    bounds = torch.tensor([0, 70], dtype=torch.int32, device=device)
    alone = Sequences(sequences.block_table[1:], bounds, sequences.seq_lens[1:], sequences.is_new[1:], False)
    out, after = by_chunks(Step(heads[9:79].clone(), gates[9:79].clone(), weights, states, alone))
    expected_out, expected_after = by_chunks(together)
    block = int(sequences.block_table[1, 0])
    assert torch.equal(out, expected_out[9:])
    assert torch.equal(after[block].nan_to_num(7.0), expected_after[block].nan_to_num(7.0))


def test_a_token_run_again_reads_its_state_and_keeps_it(device: torch.device, dtype: torch.dtype) -> None:
    step = make_step([1, 20, 1], [8, 0, 3], device, dtype, is_new=[False, True, False])
    ours = by_chunks(step)
    assert_equal(ours, in_float64(step), dtype)
    for seq in (0, 2):
        block = int(step.sequences.block_table[seq, 0])
        assert torch.equal(ours[1][block].nan_to_num(7.0), step.states[block].nan_to_num(7.0))


def test_a_prompt_may_be_cut_at_any_token(device: torch.device, dtype: torch.dtype) -> None:
    whole = make_step([150], [0], device, dtype)
    out, states = by_chunks(whole)
    heads, gates, weights, parts, sequences = whole
    outputs = []
    for begin, end in ((0, 37), (37, 101), (101, 150)):
        bounds, lens = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([0, end - begin], [end]))
        part = Sequences(sequences.block_table, bounds, lens, sequences.is_new, False)
        each, parts = by_chunks(Step(heads[begin:end].clone(), gates[begin:end].clone(), weights, parts, part))
        outputs.append(each)
    assert_equal((torch.cat(outputs), parts), (out, states), dtype)


def test_the_recurrence_leaves_the_same_state(device: torch.device, dtype: torch.dtype) -> None:
    step = make_step([CHUNK + 9, 5], [0, 2], device, dtype)
    states = step.states.clone()
    out = recur(step.heads, step.gates, step.weights, states, step.sequences)
    assert_equal(by_chunks(step), (out[: CHUNK + 14], states), dtype)
