"""Turns of a simulated GPU: pauses within their target, first tokens sooner, and every token told."""

import pytest

from common.settings.slo_section import SloSection
from deploy.planning.simulation.layout import parse_layout
from deploy.planning.simulation.loads import Arrival, Load, streams
from deploy.planning.simulation.outcome import Outcome
from deploy.planning.simulation.simulator import simulate
from deploy.planning.step_times.costs import Costs
from deploy.planning.step_times.rates import read_rates

NO_TURNS = SloSection(itl_ms=0.0)
ONE_GPU = parse_layout("1P1D", 1)
COSTS = Costs(read_rates("h200-qwen3-4b"))


def busy() -> Load:
    return streams(64, [(1024, 128)] * 320)


def beside(client: str) -> Load:
    """Eight quiet streams, and prompts beyond what the GPU computes of a client."""
    quiet = [Arrival(0.0, 1024, 3000, client="quiet") for _ in range(8)]
    return Load([*quiet, *(Arrival(500.0 + 10.0 * k, 1024, 1, client=client) for k in range(1500))])


def times(outcome: Outcome) -> tuple[float, float]:
    """Time of each token of quiet streams, and mean time of the others' first tokens."""
    long = [each.tpot_ms for each in outcome.requests if each.num_outputs > 1]
    ttfts = [each.ttft_ms for each in outcome.requests if each.num_outputs == 1]
    return max(long), sum(ttfts) / len(ttfts)


def num_gaps(outcome: Outcome) -> int:
    return sum(count for _, count in outcome.gaps)


@pytest.mark.parametrize("itl_ms", [50.0, 100.0])
def test_late_prompts_get_the_gpu_and_streams_pause_no_longer_than_asked(itl_ms: float) -> None:
    usual, turns = (simulate(ONE_GPU, COSTS, busy(), targets=targets) for targets in (NO_TURNS, SloSection(itl_ms)))
    assert turns.figure("ttft_p99") < 0.9 * usual.figure("ttft_p99")
    assert turns.figure("tpot_p50") < usual.figure("tpot_p50")
    assert usual.figure("itl_p99") < 0.5 * itl_ms < turns.figure("itl_p99") <= itl_ms
    assert num_gaps(turns) == num_gaps(usual) == 320 * 126, "each token has its gap"


def test_without_a_target_of_pauses_no_stream_is_stopped() -> None:
    assert simulate(ONE_GPU, COSTS, busy(), targets=SloSection(itl_ms=0.0)).figure("itl_p99") < 20.0


def test_apart_from_decode_steps_prompts_need_no_turns() -> None:
    two = parse_layout("1P1D", 2)
    told = [simulate(two, COSTS, busy(), targets=targets) for targets in (NO_TURNS, SloSection())]
    assert told[0].figure("ttft_p99") == told[1].figure("ttft_p99")


@pytest.mark.medium
def test_a_client_that_sends_prompts_without_end_delays_its_own_streams_and_nobody_else_s() -> None:
    token_ms, first_ms = times(simulate(ONE_GPU, COSTS, beside("heavy"), targets=NO_TURNS))
    others_ms, theirs_ms = times(simulate(ONE_GPU, COSTS, beside("heavy")))
    assert others_ms < 1.06 * token_ms, "a burst in half a minute"
    assert theirs_ms <= first_ms
    own_ms, own_first_ms = times(simulate(ONE_GPU, COSTS, beside("quiet")))
    assert own_ms > 1.2 * token_ms
    assert own_first_ms < 0.5 * first_ms
