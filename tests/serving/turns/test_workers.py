"""Turns of two workers on one page: what the prefill worker claims, and when the decode worker launches."""

from dataclasses import dataclass

import pytest

from common.serving.turns.allowance import BURST_MS
from common.serving.turns.decode_gate import FRESH_S, TurnGate
from common.serving.turns.forecast import LearnedForecast, Work
from common.serving.turns.law import TurnLaw
from common.serving.turns.page import PAGE_BYTES, TurnPage
from common.serving.turns.prompt_turns import Launched, PromptTurns
from common.settings.slo_section import SloSection

DECODE_S, CLIENT = 0.005, 7


@dataclass
class Prompt:
    arrived_s: float
    num_tokens: int
    num_found: int = 0
    num_scheduled_tokens: int = 0
    client: int = CLIENT


class Gpu:
    """A clock, a page, and both workers' sides."""

    def __init__(self, writer: int = 3) -> None:
        self.now_s = 100.0
        self.page = TurnPage(bytearray(PAGE_BYTES))
        self.forecast = LearnedForecast(Work(8.1e-5))
        law = TurnLaw(SloSection(), self.forecast)
        self.turns = PromptTurns(law, self.forecast, self.page, writer, clock=lambda: self.now_s)
        self.gate = TurnGate(self.page, clock=lambda: self.now_s)

    def learn(self) -> None:
        """Let a step of 2,048 tokens alone take 24 ms."""
        step = Launched(self.turns.plan([], []), [(2048, 0)], True)
        self.turns.begin(step)
        self.now_s += 0.024
        self.turns.end(step, None)

    def launched(self, num_tokens: int = 2048) -> Launched:
        """A step for a prompt that arrived a second ago."""
        plan = self.turns.plan([Prompt(self.now_s - 1.0, num_tokens)], [])
        chunks = [(num_tokens, 0)]
        return Launched(plan, chunks, self.turns.has_whole(plan, chunks))


def pressed() -> Gpu:
    gpu = Gpu()
    gpu.learn()
    gpu.gate.launched(DECODE_S, CLIENT)
    return gpu


def test_without_a_known_speed_there_are_no_turns() -> None:
    gpu = Gpu()
    gpu.gate.launched(DECODE_S, CLIENT)
    assert not gpu.launched().plan.is_turn
    assert not gpu.turns.in_turns


def test_a_decode_step_in_each_turn_and_none_more() -> None:
    gpu = pressed()
    first, second = gpu.launched(), gpu.launched()
    assert first.plan.is_turn and first.has_whole
    gpu.turns.begin(first)
    assert not gpu.gate.is_closed()
    gpu.gate.launched(DECODE_S, CLIENT)
    assert gpu.gate.is_closed(), "the turn has had its step"
    gpu.now_s += 0.03
    gpu.turns.end(first, second)
    assert not gpu.gate.is_closed(), "the next turn has not"
    gpu.gate.launched(DECODE_S, CLIENT)
    assert gpu.gate.is_closed()
    gpu.now_s += 0.03
    gpu.turns.end(second, None)
    assert not gpu.gate.is_closed(), "the last turn is over"
    assert gpu.turns.num_turns == 2


def test_a_step_side_by_side_behind_a_turn_ends_the_claim() -> None:
    gpu = pressed()
    turn, usual = gpu.launched(), Launched(gpu.turns.plan([], []), [(100, 0)], False)
    gpu.turns.begin(turn)
    gpu.gate.launched(DECODE_S, CLIENT)
    gpu.turns.end(turn, usual)
    assert not gpu.gate.is_closed()
    assert gpu.page.turn(int(gpu.now_s * 1e6)) == 0


def test_the_claim_of_a_dead_prefill_worker_ends_by_itself() -> None:
    gpu = pressed()
    turn = gpu.launched()
    gpu.turns.begin(turn)
    gpu.gate.launched(DECODE_S, CLIENT)
    gpu.now_s += 1.3 * turn.plan.pause_ms / 1e3
    assert not gpu.gate.is_closed()


def test_a_successor_s_turns_are_no_turns_of_the_dead() -> None:
    gpu = pressed()
    gpu.turns.begin(gpu.launched())
    gpu.gate.launched(DECODE_S, CLIENT)
    successor = PromptTurns(gpu.turns.law, gpu.forecast, gpu.page, writer=(1 << 63) + 4, clock=lambda: gpu.now_s)
    successor.begin(gpu.launched())
    assert not gpu.gate.is_closed(), "both have counted one turn"


def test_without_decode_steps_long_steps_have_the_whole_gpu_and_take_no_turns() -> None:
    gpu = pressed()
    assert gpu.launched().plan.is_turn
    gpu.gate.rest()
    idle = gpu.launched()
    assert (idle.plan.is_turn, idle.has_whole) == (False, True)
    assert gpu.launched(100).has_whole
    short, long = [(50, 0), (50, 0)], [(500, 0), (50, 0)]
    assert [gpu.turns.has_whole(idle.plan, chunks) for chunks in (short, long)] == [False, True], "graphs of the share"
    gpu.gate.launched(DECODE_S, CLIENT)
    assert not gpu.turns.has_whole(idle.plan, long)


def test_a_decode_worker_that_dies_is_forgotten() -> None:
    gpu = pressed()
    gpu.now_s += 1.1 * FRESH_S
    assert not gpu.launched().plan.is_turn


def test_the_decode_step_of_a_turn_does_not_slow_the_forecast() -> None:
    gpu = pressed()
    for _ in range(40):
        turn = gpu.launched()
        gpu.turns.begin(turn)
        gpu.gate.launched(DECODE_S, CLIENT)
        gpu.now_s += 0.024 + DECODE_S
        gpu.turns.end(turn, None)
    assert abs(gpu.forecast.step_ms([(2048, 0)]) - 24.0) < 0.1


def test_what_runs_ahead_counts_for_its_rest() -> None:
    gpu = pressed()
    step = Launched(gpu.turns.plan([], []), [(8192, 0)], False)
    gpu.turns.begin(step)
    fresh = Prompt(gpu.now_s, 1024)
    assert gpu.turns.plan([fresh], [step]).is_turn, "some 120 ms run ahead"
    gpu.now_s += 0.115
    fresh.arrived_s = gpu.now_s
    gpu.turns.law.is_pressed = False
    assert not gpu.turns.plan([fresh], [step]).is_turn


@pytest.mark.parametrize(
    ("streams", "clients", "is_own"),
    [(7, [7], True), (0, [0], True), (7, [7, 7], True), (7, [8], False), (None, [7], False), (7, [7, 8], False)],
)
def test_turns_are_a_client_s_own_if_all_prompts_and_streams_are_its(
    streams: int | None, clients: list[int], is_own: bool
) -> None:
    gpu = pressed()
    gpu.gate.launched(DECODE_S, streams)
    prompts = [Prompt(gpu.now_s - 1.0, 2048, client=client) for client in clients]
    plan = gpu.turns.plan(prompts, [])
    assert (plan.is_turn, plan.is_own) == (True, is_own)
    turn = Launched(plan, [(2048, 0)], True)
    gpu.turns.begin(turn)
    gpu.now_s += BURST_MS / 1e3
    gpu.turns.end(turn, None)
    gpu.gate.launched(DECODE_S, streams)
    assert gpu.turns.plan(prompts, []).is_turn == gpu.turns.in_turns == is_own, "the burst is over"
