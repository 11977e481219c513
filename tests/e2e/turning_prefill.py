"""`python -m tests.e2e.turning_prefill`: a prefill worker on a CPU for whose prompts streams always wait."""

import sys

from common.serving.turns import law
from common.serving.turns.forecast import LearnedForecast, Work
from common.serving.turns.prompt_turns import PromptTurns
from common.serving.turns.shared import open_page
from common.serving.worker.start import Incarnation, worker_main
from common.settings.config import Config
from common.settings.slo_section import SloSection
from common.wire.messages.worker import Role
from prefill_worker import __main__ as program
from prefill_worker.worker import PrefillWorker

STEP_TOKENS, STEP_MS = 64, 600.0


def build(config: Config, incarnation: Incarnation) -> PrefillWorker:
    law.LEAST_TOKENS, law.TURN_TOKENS = 1, (STEP_TOKENS,)  # type: ignore[assignment]
    worker, forecast = program.build(config, incarnation), LearnedForecast(Work(0.0))
    forecast.learn([(100 * STEP_TOKENS, 0)], 100 * STEP_MS)
    page = open_page(incarnation.memory.path)
    turns = law.TurnLaw(SloSection(itl_ms=2 * STEP_MS, ttft_ms=0.0), forecast)
    worker.steps.plans = PromptTurns(turns, forecast, page, incarnation.epoch)
    return worker


if __name__ == "__main__":
    sys.exit(worker_main(Role.PREFILL, program.DESCRIPTION, build))
