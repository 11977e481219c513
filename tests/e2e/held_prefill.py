"""`python -m tests.e2e.held_prefill`: a prefill worker that a test holds, and that takes all it can."""

import logging
import sys

from common.serving.prompts.scheduler import Chunk
from common.serving.worker.start import Incarnation, worker_main
from common.settings.config import Config
from common.wire.messages.worker import Role
from prefill_worker.__main__ import DESCRIPTION
from prefill_worker.sequence import PrefillSequence
from prefill_worker.worker import PrefillWorker
from tests.e2e import slow_prefill as program
from tests.e2e.hold import Holds, holds_of

logger = logging.getLogger(__name__)


def build(config: Config, incarnation: Incarnation) -> PrefillWorker:
    worker, holds = program.build(config, incarnation), holds_of(config)
    hold_steps(worker, holds)
    hold_retrievals(worker, holds)
    return worker


def hold_steps(worker: PrefillWorker, holds: Holds) -> None:
    schedule, num_steps = worker.scheduler.schedule, 0

    def schedule_if_allowed(num_launched: int = 0, most: int = 0) -> list[Chunk[PrefillSequence]]:
        nonlocal num_steps
        chunks = schedule(num_launched, most) if holds.prompt_steps.allows(num_steps) else []
        num_steps += bool(chunks)
        return chunks

    worker.scheduler.schedule = schedule_if_allowed  # type: ignore[method-assign]


def hold_retrievals(worker: PrefillWorker, holds: Holds) -> None:
    """What is begun is asked for, and no answer is read."""
    advance = worker.retrievals.advance

    def advance_if_allowed() -> None:
        if holds.retrievals.allows(0):
            advance()
        elif worker.retrievals.under_way:
            logger.info("held amid a retrieval")

    worker.retrievals.advance = advance_if_allowed  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(worker_main(Role.PREFILL, DESCRIPTION, build))
