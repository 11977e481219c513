"""`python -m tests.e2e.held_decode`: a decode worker that stands still where a test holds it."""

import sys

from common.serving.prompts.scheduler import Chunk
from common.serving.worker.start import Incarnation, worker_main
from common.settings.config import Config
from common.wire.messages.worker import Role
from decode_worker import __main__ as program
from decode_worker.arrivals.local_prompts import LocalPrompt
from decode_worker.worker import DecodeWorker
from tests.e2e.hold import Holds, holds_of


def build(config: Config, incarnation: Incarnation) -> DecodeWorker:
    worker, holds = program.build(config, incarnation), holds_of(config)
    hold_texts(worker, holds)
    hold_prompts(worker, holds)
    return worker


def hold_texts(worker: DecodeWorker, holds: Holds) -> None:
    """Steps are launched only for the sake of a text that may have more tokens; others get on with it."""
    is_due = worker.steps.is_due

    def is_due_and_allowed() -> bool:
        rows = worker.scheduler.rows.sequences
        return is_due() and any(holds.texts.allows(sequence.num_outputs) for sequence in rows)

    worker.steps.is_due = is_due_and_allowed  # type: ignore[method-assign]


def hold_prompts(worker: DecodeWorker, holds: Holds) -> None:
    """Of prompts that are computed here a step is a chunk."""
    prompts, num_steps = worker.local_prompts, 0
    schedule = prompts.schedule

    def schedule_if_allowed() -> list[Chunk[LocalPrompt]]:
        nonlocal num_steps
        chunks = schedule() if holds.prompt_steps.allows(num_steps) else []
        num_steps += bool(chunks)
        return chunks

    prompts.schedule = schedule_if_allowed  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(worker_main(Role.DECODE, program.DESCRIPTION, build))
