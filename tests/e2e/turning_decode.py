"""`python -m tests.e2e.turning_decode`: a decode worker on a CPU that waits in turns of prompts."""

import sys

from common.serving.turns.decode_gate import TurnGate
from common.serving.turns.shared import open_page
from common.serving.worker.start import Incarnation, worker_main
from common.settings.config import Config
from common.wire.messages.worker import Role
from decode_worker import __main__ as program
from decode_worker.worker import DecodeWorker


def build(config: Config, incarnation: Incarnation) -> DecodeWorker:
    worker = program.build(config, incarnation)
    worker.steps.gate = TurnGate(open_page(incarnation.memory.path))
    return worker


if __name__ == "__main__":
    sys.exit(worker_main(Role.DECODE, program.DESCRIPTION, build))
