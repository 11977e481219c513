"""Penalties, biases and bans: the kernel changes and counts what the reference does, over many steps."""

import pytest
import torch

from common.device.steps.adjustments import Adjustments, SlotFill, make_grammar_masks
from common.device.steps.warm_up import sampling_tensors
from common.kernels.sampling.adjust_logits import CHUNK, adjust_logits
from common.ops import reference
from common.wire.values.packing import pack_ids
from common.wire.values.sampling_params import (
    MAX_BAD_WORDS,
    MAX_BIASED,
    MAX_STOP_TOKENS,
    MAX_WORD_TOKENS,
    SamplingParams,
)
from tests.support.adjusting import adjusted

CPU = torch.device("cpu")


def requests(vocab: int) -> list[SamplingParams]:
    many = tuple(torch.randperm(vocab)[:MAX_BIASED].tolist())
    biases = tuple((torch.rand(len(many)) * 200 - 100).tolist())
    stops = tuple(torch.randint(vocab + 100, (MAX_STOP_TOKENS,)).tolist())  # some are of no token
    return [
        SamplingParams(presence_penalty=2.0, frequency_penalty=0.5),
        SamplingParams(),
        SamplingParams(repetition_penalty=1.5, frequency_penalty=-2.0),
        SamplingParams(biased_token_ids=many, biases=biases),
        SamplingParams(biased_token_ids=many, biases=biases, stop_token_ids=stops, min_tokens=3),
        SamplingParams(stop_token_ids=stops, min_tokens=100, presence_penalty=-1.0),
        SamplingParams(allowed_token_ids=pack_ids(range(vocab // 3, vocab + 9)), repetition_penalty=0.8),
        SamplingParams(allowed_token_ids=pack_ids([vocab - 1, vocab + 1])),
        SamplingParams(bad_words=bad_words(vocab), repetition_penalty=1.2),
        SamplingParams(bad_words=bad_words(vocab)[:1], biased_token_ids=many, biases=biases),
    ]


def bad_words(vocab: int) -> tuple[bytes, ...]:
    """As many as there may be, of few tokens, so that some are about to be complete at each step."""
    lengths = [1 + i % 4 for i in range(MAX_BAD_WORDS - 2)] + [MAX_WORD_TOKENS] * 2
    words = [torch.randint(min(9, vocab), (length,)) for length in lengths]
    for word in words[::7]:
        word[-1] = vocab - 1
    words[-1].fill_(4)
    words[0][-1] = vocab + 3  # of no token
    return tuple(pack_ids(word.tolist()) for word in words)


@pytest.mark.parametrize("vocab", [33, CHUNK, 2 * CHUNK + 7, 9001])
def test_logits_and_counts_become_what_the_reference_makes_them(vocab: int, device: torch.device) -> None:
    params = requests(vocab)
    num_rows, prompt = len(params), torch.randint(vocab, (40,)).tolist()
    sides = [Adjustments(num_rows + 3, vocab, on) for on in (CPU, device)]
    slots = torch.randperm(num_rows + 3)[:num_rows].int()
    for side in sides:
        for poisoned in side.tensors.columns():
            poisoned.fill_(7)
        side.fill([SlotFill(int(slots[i]), each, prompt, 10) for i, each in enumerate(params)])
    slots[1] = -1
    tensors = [sampling_tensors(params, on) for on in (CPU, device)]
    for step in range(5):
        logits = torch.randn(num_rows, vocab + 5) * 8
        logits[:, step * 3] = float("-inf")
        last_ids = torch.randint(min(9, vocab), (num_rows,)).int()
        last_ids[2] = -1  # nothing to count
        positions = torch.full((num_rows,), 30 + step, dtype=torch.int32)
        ours, theirs = logits.to(device).clone(), logits.clone()
        reference.adjust_logits(theirs[:, :vocab], tensors[0], slots, sides[0].tensors, last_ids, positions)
        columns = (slots.to(device), sides[1].tensors, last_ids.to(device), positions.to(device))
        adjust_logits(ours[:, :vocab], tensors[1], *columns)
        torch.testing.assert_close(ours.cpu(), theirs)
        assert torch.equal(ours[1].cpu(), logits[1]) and torch.equal(ours[:, vocab:].cpu(), logits[:, vocab:])
        for mine, law in zip(sides[1].tensors.columns(), sides[0].tensors.columns(), strict=True):
            assert torch.equal(mine.cpu(), law)


def test_the_longest_words_are_banned_when_all_but_their_last_token_stand(device: torch.device) -> None:
    vocab, num_steps = 2 * CHUNK, 2 * MAX_WORD_TOKENS
    outputs = [4, 5, 4] * num_steps
    words = [[*outputs[: MAX_WORD_TOKENS - 1], vocab - 1], [4] * MAX_WORD_TOKENS, [5, 4, 4, 3]]
    params = [SamplingParams(bad_words=tuple(map(pack_ids, words)))]
    state, slots = Adjustments(1, vocab, device), torch.zeros(1, dtype=torch.int32, device=device)
    state.fill([SlotFill(0, params[0], [4, 5, 4, *outputs[:2]], 2)])
    for num_outputs in range(3, num_steps):
        logits, law = torch.ones(1, vocab, device=device), torch.ones(vocab)
        last_ids, positions = (torch.full_like(slots, value) for value in (outputs[num_outputs - 1], 3 + num_outputs))
        adjust_logits(logits, sampling_tensors(params, device), slots, state.tensors, last_ids, positions)
        assert torch.equal(logits[0].cpu(), adjusted(law, params[0], [4, 5, 4], outputs[:num_outputs]))
        assert (logits[0, vocab - 1].item() < 0) is (outputs[:num_outputs][-15:] == words[0][:-1] and num_outputs >= 15)


def test_a_row_is_changed_alike_alone_and_among_others(device: torch.device) -> None:
    params, vocab = requests(3000), 3000
    logits = torch.randn(len(params), vocab, device=device)
    last_ids = torch.arange(len(params), dtype=torch.int32, device=device)
    together, alone = logits.clone(), logits.clone()
    ways = [(slice(0, len(params)), together), *((slice(i, i + 1), alone) for i in range(len(params)))]
    for rows, out in ways:
        state, all_slots = Adjustments(len(params), vocab, device), torch.arange(len(params), dtype=torch.int32)
        state.fill([SlotFill(i, params[i], [1, 2, 3], 1) for i in all_slots[rows].tolist()])
        chosen = sampling_tensors(params[rows], device)
        columns = (all_slots.to(device)[rows], state.tensors, last_ids[rows], last_ids[rows] + 9)
        adjust_logits(out[rows], chosen, *columns)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("vocab", [33, CHUNK, 2 * CHUNK + 7])
def test_rows_whose_mask_is_late_lose_all_logits_and_count_their_token_when_it_is_there(
    vocab: int, device: torch.device
) -> None:
    params = requests(vocab)
    num_rows, prompt = len(params), torch.randint(vocab, (40,)).tolist()
    slots = torch.randperm(num_rows + 3)[:num_rows].int()
    places = [-1, 5, 0, 3, -1, 9, 7, 1, 4, 10]
    sides = []
    for on in (CPU, device):
        side, grammars = Adjustments(num_rows + 3, vocab, on), make_grammar_masks(11, num_rows + 2, vocab, on)
        side.tensors.places.fill_(77)
        fills = [SlotFill(int(slots[i]), each, prompt, 10, place=places[i]) for i, each in enumerate(params)]
        side.fill(fills)
        grammars.are_late.fill_(77)
        sides.append((side.tensors, grammars, sampling_tensors(params, on), slots.to(on)))
    positions, last_ids = torch.full((num_rows,), 30, dtype=torch.int32), torch.arange(num_rows, dtype=torch.int32)
    masks = torch.randint(-(1 << 31), 1 << 31, sides[0][1].masks_cpu.shape).int()
    for num_known in range(0, 12, 3):  # of the places, from the first on
        logits = torch.randn(num_rows, vocab + 5) * 8
        results: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        for (tensors, grammars, sampling, on_slots), on in zip(sides, (CPU, device), strict=True):
            grammars.masks_cpu[:num_known] = masks[:num_known]
            grammars.positions_cpu[:num_known], grammars.positions_cpu[num_known:] = 30, 29
            adjust = adjust_logits if on is device and len(results) else reference.adjust_logits
            out = logits.to(on).clone()
            columns = (last_ids.to(on), positions.to(on), grammars)
            adjust(out[:, :vocab], sampling, on_slots, tensors, *columns)
            results.append((out.cpu(), [column.cpu() for column in tensors.columns()]))
        (theirs, law), (ours, mine) = results
        torch.testing.assert_close(ours, theirs)
        assert all(map(torch.equal, mine, law))
        late = torch.tensor([place >= num_known for place in places])
        assert torch.equal(ours[:, :vocab].amax(-1) == float("-inf"), late | (theirs[:, :vocab].amax(-1) == -torch.inf))
        assert (ours[late, :vocab] == float("-inf")).all() and torch.equal(ours[:, vocab:], logits[:, vocab:])
        assert int(law[0][slots.long()][late].bitwise_and((1 << 30) - 1).sum()) == 10 * int(late.sum())
