"""`python -m tests.e2e.stuck_decode`: a decode worker with a thread that hangs, as one in a library may."""

import sys
import threading

from common.serving.worker.start import Incarnation, worker_main
from common.settings.config import Config
from common.wire.messages.worker import Role
from decode_worker import __main__ as program
from decode_worker.worker import DecodeWorker


def build(config: Config, incarnation: Incarnation) -> DecodeWorker:
    threading.Thread(target=threading.Event().wait, name="stuck").start()
    return program.build(config, incarnation)


if __name__ == "__main__":
    sys.exit(worker_main(Role.DECODE, program.DESCRIPTION, build))
