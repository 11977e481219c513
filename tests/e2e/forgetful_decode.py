"""`python -m tests.e2e.forgetful_decode`: a decode worker to which the first handoff never comes."""

import sys

from common.config import DECODE_SECTIONS, Config
from common.serving.worker_main import Incarnation, worker_main
from common.wire.handoff_messages import KVHandoff
from common.wire.messages import Role
from decode_worker import __main__ as program
from decode_worker.worker import DecodeWorker


def build(config: Config, incarnation: Incarnation) -> DecodeWorker:
    worker = program.build(config, incarnation)
    accept, lost = worker.intake.accept, list[KVHandoff]()

    def lose_the_first(message: KVHandoff) -> None:
        if lost:
            accept(message)
        else:
            lost.append(message)

    worker.intake.accept = lose_the_first  # type: ignore[method-assign]
    return worker


if __name__ == "__main__":
    sys.exit(worker_main(Role.DECODE, DECODE_SECTIONS, program.DESCRIPTION, build))
