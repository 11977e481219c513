"""`python -m tests.e2e.held_prefill`: a prefill worker that stands still where a test holds it."""

import sys

from common.config import WORKER_SECTIONS, Config
from common.serving.worker_main import Incarnation, worker_main
from common.wire.messages import Role
from prefill_worker import __main__ as program
from prefill_worker.scheduler import Chunk
from prefill_worker.worker import PrefillWorker
from tests.e2e.hold import holds_of


def build(config: Config, incarnation: Incarnation) -> PrefillWorker:
    worker, hold, num_steps = program.build(config, incarnation), holds_of(config).prompt_steps, 0
    schedule = worker.scheduler.schedule

    def schedule_if_allowed() -> list[Chunk]:
        nonlocal num_steps
        chunks = schedule() if hold.allows(num_steps) else []
        num_steps += bool(chunks)
        return chunks

    worker.scheduler.schedule = schedule_if_allowed  # type: ignore[method-assign]
    return worker


if __name__ == "__main__":
    sys.exit(worker_main(Role.PREFILL, WORKER_SECTIONS, program.DESCRIPTION, build))
