"""`python -m tests.e2e.slow_prefill`: a prefill worker to which computing seems slow, so that it takes all it can."""

import sys

from common.serving.worker.start import Incarnation, worker_main
from common.settings.config import Config
from common.wire.messages.worker import Role
from prefill_worker import __main__ as program
from prefill_worker.worker import PrefillWorker
from tests.support.slow_rate import SlowRate


def build(config: Config, incarnation: Incarnation) -> PrefillWorker:
    worker = program.build(config, incarnation)
    worker.prefixes.rate = worker.prefixes.grants.rate = worker.retrievals.worth.rate = SlowRate()
    return worker


if __name__ == "__main__":
    sys.exit(worker_main(Role.PREFILL, program.DESCRIPTION, build))
