"""`python -m tests.e2e.faulty_decode`: a decode worker whose device meets a fault when a test says so.

As a kernel may that goes astray, it has written all over the pool by then, its neighbours' blocks included. On a GPU
there is such a kernel; on a CPU the worker is told of one.
"""

import sys

from common.serving.worker import start
from common.serving.worker.start import Incarnation
from common.settings.config import Config
from common.wire.messages.worker import Role
from decode_worker import __main__ as program
from decode_worker.worker import DecodeWorker
from tests.e2e import held_decode
from tests.e2e.hold import holds_of

FAULT = "CUDA error: an illegal memory access was encountered"


def build(config: Config, incarnation: Incarnation) -> DecodeWorker:
    worker, is_well = held_decode.build(config, incarnation), holds_of(config).faults
    beat = worker.report_load

    def beat_while_well() -> None:
        if not is_well.allows(1):
            is_well.release()
            worker.engine.pool.blocks[0].fill_(0xFF)
            if worker.engine.device.type == "cuda":
                from tests.e2e.stray_kernel import meet_fault

                meet_fault(worker.engine.device)
            start.device_fault = lambda: FAULT  # type: ignore[attr-defined]
            raise RuntimeError(FAULT)
        beat()

    worker.report_load = beat_while_well  # type: ignore[method-assign]
    return worker


if __name__ == "__main__":
    sys.exit(start.worker_main(Role.DECODE, program.DESCRIPTION, build))
