"""`python -m tests.e2e.forgetful_decode`: a decode worker that loses the first prompt it has received."""

import sys

from common.serving.worker.start import Incarnation, worker_main
from common.settings.config import Config
from common.wire.messages.memory import KVOffer
from common.wire.messages.worker import Role
from decode_worker import __main__ as program
from decode_worker.sequences.sequence import DecodeSequence
from decode_worker.worker import DecodeWorker


def build(config: Config, incarnation: Incarnation) -> DecodeWorker:
    worker = program.build(config, incarnation)
    add, lost = worker.offers.add, list[KVOffer]()

    def lose_the_first(sequence: DecodeSequence, offer: KVOffer) -> None:
        if lost:
            add(sequence, offer)
        else:
            lost.append(offer)
            worker.offers.shared.decline(offer)

    worker.offers.add = lose_the_first  # type: ignore[method-assign]
    return worker


if __name__ == "__main__":
    sys.exit(worker_main(Role.DECODE, program.DESCRIPTION, build))
