"""Turns of a simulated GPU: pauses within their target, first tokens sooner, and every token told."""

import pytest

from common.settings.slo_section import SloSection
from deploy.planning.simulation.layout import parse_layout
from deploy.planning.simulation.loads import Load, streams
from deploy.planning.simulation.outcome import Outcome
from deploy.planning.simulation.simulator import simulate
from deploy.planning.step_times.costs import Costs
from deploy.planning.step_times.rates import read_rates

NO_TURNS = SloSection(itl_ms=0.0)
ONE_GPU = parse_layout("1P1D", 1)
COSTS = Costs(read_rates("h200-qwen3-4b"))


def busy() -> Load:
    return streams(64, [(1024, 128)] * 320)


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
