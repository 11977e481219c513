"""Log-probabilities: the same entries as the reference's, in the same order, whatever ties and infinities there are."""

import pytest
import torch
from torch import Tensor

from common.device.steps.output_ring import StepOutput, make_logprob_ring, make_ring
from common.kernels.base.sampling_operands import MAX_LOGPROBS
from common.kernels.sampling.logprobs import PART, land_logprobs, logprobs
from common.ops import reference
from common.wire.values import output_token
from common.wire.values.output_token import Logprobs


def entries(words: Tensor) -> list[Logprobs | None]:
    output = StepOutput.with_logprobs(range(len(words)), words.cpu().numpy())
    return [token.logprobs for [token] in output.rows]


def assert_same(ours: list[Logprobs | None], theirs: list[Logprobs | None]) -> None:
    assert [each and each.token_ids for each in ours] == [each and each.token_ids for each in theirs]
    for mine, law in zip(ours, theirs, strict=True):
        assert (mine and mine.values) == (law and pytest.approx(law.values, rel=1e-5, abs=1e-5))


def make_logits(num_rows: int, vocab: int) -> Tensor:
    logits = torch.randn(num_rows, vocab) * 6
    logits[1] = logits[1].round()  # ties
    logits[2] = -7.0
    logits[3, torch.randperm(vocab)[: vocab - 4]] = float("-inf")
    logits[4, vocab // 2] = float("nan")
    logits[5] = float("-inf")
    logits[6] -= 1e4
    return logits


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter's numpy; that is the point here
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("vocab", [5, PART, 2 * PART + 3, 9001])
def test_entries_are_those_of_the_reference(vocab: int, device: torch.device) -> None:
    logits = make_logits(9, vocab + 3)[:, :vocab]
    tokens = torch.randint(vocab, (9,)).int()
    tokens[5] = -2  # nothing to choose
    num_wanted = torch.tensor([1, 21, 21, 6, 21, 3, 2, 0, 21], dtype=torch.int32)
    ours = entries(logprobs(logits.to(device), num_wanted.to(device), tokens.to(device)))
    theirs = entries(reference.logprobs(logits, num_wanted, tokens))
    assert_same(ours, theirs)
    assert [each and each.token_ids[0] for each in ours] == [*tokens[:5].tolist(), 0, int(tokens[6]), None, tokens[8]]


def test_the_chosen_token_has_the_number_that_it_has_among_the_likeliest(device: torch.device) -> None:
    logits = torch.randn(50, 3000, device=device) * 4
    tokens = logits.argmax(dim=-1).int()
    wanted = torch.full_like(tokens, 6)
    for each in entries(logprobs(logits, wanted, tokens)):
        assert each is not None and (each.token_ids[0], each.values[0]) == (each.token_ids[1], each.values[1])
        assert list(each.values[1:]) == sorted(each.values[1:], reverse=True)


def test_they_lie_beside_the_tokens_of_their_step(device: torch.device) -> None:
    torch.manual_seed(3)
    sides = []
    for on in (torch.device("cpu"), device):
        ring = make_ring(5, on)
        sides.append((ring, make_logprob_ring(ring)))
    (ring, words), (device_ring, device_words) = sides
    for num_rows in (5, 3, 5, 1, 4):
        logits, tokens = torch.randn(num_rows, 40), torch.randint(40, (num_rows,)).int()
        wanted = torch.randint(4, (num_rows,)).int()
        reference.land(tokens, ring)
        reference.land_logprobs(reference.logprobs(logits, wanted, tokens), words)
        reference.land(tokens.to(device), device_ring)
        land_logprobs(logits.to(device), wanted.to(device), tokens.to(device), device_words)
        turns = (device_ring.turns.cpu().long() - 1) % ring.tokens_cpu.shape[1]  # waits for the device
        mine, law = (each.words_cpu[torch.arange(num_rows), turns[:num_rows]] for each in (device_words, words))
        assert_same(entries(mine), entries(law))


def test_a_row_has_room_for_what_may_be_asked_for() -> None:
    assert MAX_LOGPROBS == output_token.MAX_LOGPROBS
