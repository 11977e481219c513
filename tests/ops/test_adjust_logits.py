"""Penalties, biases and bans by reference, against what their definitions say of one token at a time."""

import pytest
import torch
from torch import Tensor

from common.device.steps.adjustments import Adjustments, SlotFill
from common.device.steps.warm_up import sampling_tensors
from common.ops.sampler import AdjustedRows, Sampler
from common.wire.values.packing import pack_ids
from common.wire.values.sampling_params import SamplingParams
from tests.support.adjusting import adjusted

CPU, VOCAB = torch.device("cpu"), 70
PROMPT, OUTPUTS = [3, 5, 5, 9, 69], [5, 7, 7, 7, 0]


def words(*token_ids: list[int]) -> tuple[bytes, ...]:
    return tuple(map(pack_ids, token_ids))


REQUESTS = [
    SamplingParams(presence_penalty=0.75),
    SamplingParams(frequency_penalty=-1.5),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.5, presence_penalty=-2.0, frequency_penalty=0.25),
    SamplingParams(stop_token_ids=(1, 33), min_tokens=6),
    SamplingParams(stop_token_ids=(1, 33), min_tokens=5, repetition_penalty=1.1),
    SamplingParams(biased_token_ids=(5, 69, 2), biases=(-100.0, 2.5, 100.0), repetition_penalty=2.0),
    SamplingParams(biased_token_ids=(1, 33), biases=(50.0, -3.0), stop_token_ids=(33,), min_tokens=100),
    SamplingParams(allowed_token_ids=pack_ids([7, 8, 31, 32, 69, 1000]), frequency_penalty=2.0),
    SamplingParams(bad_words=words([7], [5, 7], [7, 7, 0], [69, 5, 7], [5, 7, 7, 7, 0, 3], [0, 2], [1, 4], [80])),
    SamplingParams(bad_words=words([7, 7, 7], [5] * 16, [7, 7, 9], [7, 7, 7, 0, 6]), frequency_penalty=1.0),
    SamplingParams(bad_words=words([5, 8], [9, 69, 5]), biased_token_ids=(8,), biases=(100.0,)),
    SamplingParams(),
]


def expected(logits: Tensor, prompt: list[int], outputs: list[int]) -> Tensor:
    return torch.stack([adjusted(row, params, prompt, outputs) for row, params in zip(logits, REQUESTS, strict=True)])


@pytest.mark.parametrize("num_counted_before", range(len(OUTPUTS)))
def test_each_step_counts_its_last_token_and_changes_logits_as_defined(num_counted_before: int) -> None:
    """However much of a sequence its slot was filled from, and how much steps have counted since."""
    torch.manual_seed(21)
    adjustments, sampler = Adjustments(len(REQUESTS), VOCAB, CPU), Sampler("torch", 1, VOCAB, CPU)
    for poisoned in adjustments.tensors.columns():
        poisoned.random_(1, 9)
    known = [*PROMPT, *OUTPUTS[:num_counted_before]]
    adjustments.fill([SlotFill(i, params, known, num_counted_before) for i, params in enumerate(REQUESTS)])
    tensors, slots = sampling_tensors(REQUESTS, CPU), torch.arange(len(REQUESTS), dtype=torch.int32)
    for num_outputs in range(num_counted_before + 1, len(OUTPUTS) + 1):
        outputs, logits = OUTPUTS[:num_outputs], torch.randn(len(REQUESTS), VOCAB) * 5
        wanted = expected(logits, PROMPT, outputs)
        last_ids = torch.full((len(REQUESTS),), outputs[-1], dtype=torch.int32)
        positions = torch.full_like(last_ids, len(PROMPT) + num_outputs)
        sampler.adjust(logits, tensors, AdjustedRows(slots, last_ids, positions), adjustments.tensors)
        torch.testing.assert_close(logits, wanted)


def test_a_prompt_counts_all_it_has_and_rows_without_a_slot_stay_as_they_are() -> None:
    torch.manual_seed(22)
    adjustments, sampler = Adjustments(len(REQUESTS), VOCAB, CPU), Sampler("torch", 1, VOCAB, CPU)
    adjustments.fill([SlotFill(i, p, [*PROMPT, *OUTPUTS], len(OUTPUTS)) for i, p in enumerate(REQUESTS)])
    slots, logits = torch.arange(len(REQUESTS), dtype=torch.int32), torch.randn(len(REQUESTS), VOCAB) * 5
    slots[3] = -1
    before, wanted = logits.clone(), expected(logits, PROMPT, OUTPUTS)
    none = torch.full_like(slots, -1)
    positions = torch.full_like(slots, len(PROMPT) + len(OUTPUTS))
    for _ in range(2):  # nothing is counted, so nothing differs the second time
        logits.copy_(before)
        rows = AdjustedRows(slots, none, positions)
        sampler.adjust(logits, sampling_tensors(REQUESTS, CPU), rows, adjustments.tensors)
        assert torch.equal(logits[3], before[3])
        wanted[3] = before[3]
        torch.testing.assert_close(logits, wanted)


def test_requests_without_a_change_need_no_slot() -> None:
    assert [params.adjusts_logits for params in REQUESTS] == [True] * (len(REQUESTS) - 1) + [False]
    assert not SamplingParams(temperature=0.5, top_k=3, stop_token_ids=(1,), repetition_penalty=1.0).adjusts_logits
    assert not SamplingParams(min_tokens=5).adjusts_logits, "nothing stops it before"
