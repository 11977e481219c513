"""Tokens come to the host as they were when their step ended, though later steps were launched meanwhile."""

from collections import deque

import pytest
import torch

from common.device.steps.output_ring import NUM_SLOTS, Landing, PendingOutput, RingLanding, StepOutput
from common.ops import reference

MAX_ROWS = 9
InFlight = deque[tuple[PendingOutput, list[int]]]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device(request.param)


def check_oldest(in_flight: InFlight) -> None:
    pending, expected = in_flight.popleft()
    assert pending.output() == StepOutput.of_one_each(expected)
    assert pending.ready()


def test_a_ring_holds_each_step_whatever_rows_the_others_had(device: torch.device) -> None:
    landing = RingLanding(MAX_ROWS, device)
    in_flight: InFlight = deque()
    for step in range(40):
        num_run = 1 + step * 7 % MAX_ROWS
        num_rows = 1 + step % num_run
        tokens = torch.arange(num_run, dtype=torch.int32) + 100 * step
        reference.land(tokens.to(device), landing.ring)
        in_flight.append((landing.launched(num_rows, num_run), tokens[:num_rows].tolist()))
        if len(in_flight) == NUM_SLOTS:
            check_oldest(in_flight)


def test_a_step_that_left_no_tokens_is_noticed(device: torch.device) -> None:
    landing = RingLanding(MAX_ROWS, device)
    reference.land(torch.ones(3, dtype=torch.int32, device=device), landing.ring)
    pending = landing.launched(3, 3), landing.launched(1, 2)
    assert pending[0].output().token_ids() == [[1], [1], [1]]
    with pytest.raises(AssertionError, match="turn"):
        pending[1].output()


def test_copies_do_not_see_what_is_written_later(device: torch.device) -> None:
    landing, sampled = Landing(MAX_ROWS, device), torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
    in_flight: InFlight = deque()
    for step in range(20):
        sampled.fill_(step)
        num_rows = 1 + step % MAX_ROWS
        in_flight.append((landing.fetch(sampled[:num_rows]), [step] * num_rows))
        if len(in_flight) == NUM_SLOTS:
            check_oldest(in_flight)
