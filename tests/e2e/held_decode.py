"""`python -m tests.e2e.held_decode`: a decode worker that stands still where a test holds it."""

import sys

from common.serving.worker.start import Incarnation, worker_main
from common.settings.config import WORKER_SECTIONS, Config
from common.wire.messages.worker import Role
from decode_worker import __main__ as program
from decode_worker.worker import DecodeWorker
from tests.e2e.hold import Holds, holds_of


def build(config: Config, incarnation: Incarnation) -> DecodeWorker:
    worker, holds = program.build(config, incarnation), holds_of(config)
    hold_texts(worker, holds)
    hold_prompts(worker, holds)
    return worker


def hold_texts(worker: DecodeWorker, holds: Holds) -> None:
    """Steps are launched only for the sake of a text that may have more tokens; others get on with it."""
    can_get_on = worker._can_get_on

    def may_get_on() -> bool:
        rows = worker.scheduler.rows.sequences
        return can_get_on() and any(holds.texts.allows(sequence.num_outputs) for sequence in rows)

    worker._can_get_on = may_get_on  # type: ignore[method-assign]


def hold_prompts(worker: DecodeWorker, holds: Holds) -> None:
    """Of prompts that are computed here a step is a chunk."""
    prompts, num_steps = worker.local_prompts, 0
    choose_chunk, launch = prompts.choose_chunk, prompts.launch

    def counted() -> None:
        nonlocal num_steps
        num_steps += 1
        launch()

    prompts.launch = counted  # type: ignore[method-assign]
    prompts.choose_chunk = lambda: holds.prompt_steps.allows(num_steps) and choose_chunk()  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(worker_main(Role.DECODE, WORKER_SECTIONS, program.DESCRIPTION, build))
