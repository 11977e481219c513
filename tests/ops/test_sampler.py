"""The sampler by reference and by kernel."""

from collections import deque
from dataclasses import replace

import pytest
import torch

from common.device.steps.output_ring import NUM_SLOTS, PendingOutput, RingLanding, StepOutput, make_ring
from common.device.steps.warm_up import sampling_tensors
from common.kernels.base.gpu import gpu_of
from common.kernels.base.sampling_operands import NO_CHOICE, SamplingTensors
from common.kernels.elementwise.row_slots import row_slots
from common.ops import reference
from common.ops.base import ForwardBatch
from common.ops.sampler import Sampler
from common.wire.values.sampling_params import SamplingParams


def make_params(num_rows: int, device: torch.device) -> SamplingTensors:
    temperatures = torch.linspace(0.0, 1.5, num_rows).tolist()
    params = [SamplingParams(temperature=t, top_k=3 * i, seed=i) for i, t in enumerate(temperatures)]
    return sampling_tensors(params, device)


def test_without_kernels_it_is_the_reference() -> None:
    torch.manual_seed(12)
    device = torch.device("cpu")
    logits, params, positions = torch.randn(5, 100), make_params(5, device), torch.arange(5, dtype=torch.int32)
    tokens = Sampler("torch", 5, 100, device).sample(logits, params, positions)
    assert tokens.dtype == torch.int32
    assert torch.equal(tokens, reference.sample(logits, params, positions))


def make_step(num_rows: int, num_blocks: int, device: torch.device) -> ForwardBatch:
    """A decode batch of rows with 1, 2, ... tokens; the last row is padding."""
    seq_lens = torch.arange(1, num_rows + 1, dtype=torch.int32, device=device)
    seq_lens[-1] = 0
    positions = (seq_lens - 1).clamp(min=0)
    tables = torch.arange(num_rows * num_blocks, dtype=torch.int32, device=device).view(num_rows, num_blocks)
    return ForwardBatch(
        token_ids=torch.arange(num_rows, dtype=torch.int32, device=device),
        positions=positions,
        slots=(),
        block_tables=(tables,),
        seq_lens=seq_lens,
        cu_seqlens=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        last_tokens=None,
        max_query_len=1,
        max_seq_len=num_blocks * 4,
    )


def test_a_step_ends_with_the_sampled_tokens_in_place_and_rows_advanced() -> None:
    torch.manual_seed(14)
    device = torch.device("cpu")
    batch, params, logits = make_step(4, 3, device), make_params(4, device), torch.randn(4, 9)
    tokens = reference.sample(logits, params, batch.seq_lens)
    ring = make_ring(4, device)
    Sampler("torch", 4, 9, device).sample_and_advance(logits, params, batch, ring)
    assert torch.equal(batch.token_ids, tokens)
    assert batch.positions.tolist() == [1, 2, 3, 0]
    assert batch.seq_lens.tolist() == [2, 3, 4, 0]
    assert torch.equal(ring.tokens_cpu[:, 0], tokens)


def test_a_row_without_choice_stays_as_it_is_and_the_host_learns_of_it() -> None:
    device = torch.device("cpu")
    batch, params, logits = (
        make_step(4, 3, device),
        make_params(4, device),
        torch.randn(4, 9),
    )
    expected, before = reference.sample(logits, params, batch.seq_lens), batch.token_ids.clone()
    logits[1], expected[1] = torch.nan, NO_CHOICE
    landing = RingLanding(4, device)
    Sampler("torch", 4, 9, device).sample_and_advance(logits, params, batch, landing.ring)
    assert landing.launched(4, 4).output() == StepOutput.of_one_each(expected.tolist())
    assert torch.equal(batch.token_ids, torch.where(expected >= 0, expected, before))
    assert batch.positions.tolist() == [1, 1, 3, 0] and batch.seq_lens.tolist() == [2, 2, 4, 0]


@pytest.mark.gpu
def test_a_captured_chain_of_dependent_launches_decodes_what_the_references_decode() -> None:
    """Slots, a stand-in for the model, the sampler: replayed, each step takes up where the one before left off."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.manual_seed(15)
    device, num_rows, vocab = torch.device("cuda"), 6, 3000
    table = torch.randn(vocab, vocab, device=device) * 2
    pdl = gpu_of(device).has_dependent_launch
    sampler = Sampler("triton", num_rows, vocab, device, pdl=pdl)
    params = make_params(num_rows, device)
    batch, expected = (make_step(num_rows, 16, device) for _ in range(2))
    ring = make_ring(num_rows, device)

    def step() -> torch.Tensor:
        slots = row_slots(batch.positions, batch.seq_lens, batch.block_tables[0], 4, pdl=True)
        sampler.sample_and_advance(torch.nn.functional.embedding(batch.token_ids, table), params, batch, ring)
        return slots

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots = step()
    for i in range(30):
        if i > 0:
            graph.replay()
            wanted = reference.row_slots(expected.positions, expected.seq_lens, expected.block_tables[0], 4)
            assert torch.equal(slots, wanted)
        logits = torch.nn.functional.embedding(expected.token_ids, table)
        reference.advance(expected, reference.sample(logits, params, expected.seq_lens))
        for ours, theirs in (
            (batch.token_ids, expected.token_ids),
            (batch.positions, expected.positions),
            (batch.seq_lens, expected.seq_lens),
        ):
            assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_tokens_of_steps_in_flight_do_not_overwrite_one_another() -> None:
    """Graphs of two sizes, launched as far ahead as may be, and beside them a copy in stream order of every step."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.manual_seed(16)
    device, max_rows, vocab = torch.device("cuda"), 6, 3000
    table = torch.randn(vocab, vocab, device=device) * 2
    pdl = gpu_of(device).has_dependent_launch
    landing, sampler = RingLanding(max_rows, device), Sampler("triton", max_rows, vocab, device, pdl=pdl)
    batch, params = make_step(max_rows, 64, device), make_params(max_rows, device)

    def step(num_rows: int) -> None:
        names = ("token_ids", "positions", "seq_lens")
        rows = replace(batch, **{name: getattr(batch, name)[:num_rows] for name in names})
        logits = torch.nn.functional.embedding(rows.token_ids, table)
        sampler.sample_and_advance(logits, params.rows(num_rows), rows, landing.ring)

    graphs = {num_rows: torch.cuda.CUDAGraph() for num_rows in (max_rows, 2)}
    for num_rows, graph in graphs.items():
        step(num_rows)
        landing.launched(num_rows, num_rows)  # and never read
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            step(num_rows)
    in_flight: deque[PendingOutput] = deque()
    landed, copied, num_ahead = [], [], 0
    for i in range(60):
        num_rows = (6, 2, 2, 6, 6, 2, 6)[i % 7]
        torch.cuda._sleep(2_000_000)  # clock cycles: about a millisecond, so that the host is ahead
        graphs[num_rows].replay()
        in_flight.append(landing.launched(num_rows - i % 2, num_rows))
        copied.append(batch.token_ids[: num_rows - i % 2].clone())
        if len(in_flight) == NUM_SLOTS:
            landed.append(in_flight.popleft().output())
            num_ahead += not in_flight[0].ready()
    landed += [pending.output() for pending in in_flight]
    assert num_ahead > 0, "the host was never ahead: nothing was in flight"
    assert landed == [StepOutput.of_one_each(tokens.tolist()) for tokens in copied]
    assert len({str(output) for output in landed}) > 20, "nearly the same tokens every step prove little"


@pytest.mark.gpu
def test_with_kernels_it_draws_the_same_and_can_be_captured() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.manual_seed(13)
    device = torch.device("cuda")
    sampler = Sampler("triton", 8, 3000, device)
    logits, params = torch.randn(5, 3000, device=device), make_params(5, device)
    positions = torch.arange(5, dtype=torch.int32, device=device)
    sampler.sample(logits, params, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sampler.sample(logits, params, positions)
    for shift in range(3):
        positions += shift
        logits.copy_(torch.randn_like(logits))
        graph.replay()
        assert torch.equal(tokens, reference.sample(logits, params, positions))
