"""`python -m tests.e2e.late_decode`: a decode worker that gets a mask after a step has missed it, and says so."""

import logging
import sys
from pathlib import Path
from typing import Any

from common.grammar.follower import Outcome
from common.grammar.followers import Followers
from common.grammar.server_process import ServerProcess
from common.serving.worker.start import worker_main
from common.wire.messages.worker import Role
from decode_worker import __main__ as program
from decode_worker.sequences.sequence import DecodeSequence
from decode_worker.sequences.slots import Slots

logger = logging.getLogger(__name__)


class LateFollowers(Followers[Any]):
    """Hands out the outcome of a sequence after a step without the mask, or once no step may follow.

    Without a plain text beside them, sequences under grammars would get no step to miss their masks, and wait for ever.
    """

    def __init__(self, path: Path, vocab: int) -> None:
        super().__init__(lambda: ServerProcess(path, vocab))
        self.held: list[tuple[DecodeSequence, Outcome]] = []

    def take(self) -> list[tuple[Any, Outcome]]:
        known = [*self.held, *super().take()]
        self.held = [each for each in known if _may_be_late(each[0])]
        return [each for each in known if not _may_be_late(each[0])]

    @property
    def num_pending(self) -> int:
        return super().num_pending + len(self.held)


def _may_be_late(sequence: DecodeSequence) -> bool:
    """Tell whether the mask is still to be missed by a step."""
    return sequence.wants_step and not sequence.mask_slot.num_late


def main() -> int:
    was_late = Slots.was_late

    def say_late(slots: Slots, sequence: DecodeSequence) -> None:
        logger.warning("a mask was late")
        was_late(slots, sequence)

    Slots.was_late = say_late  # type: ignore[assignment, method-assign]
    program.make_followers = LateFollowers  # type: ignore[attr-defined]
    return worker_main(Role.DECODE, program.DESCRIPTION, program.build)


if __name__ == "__main__":
    sys.exit(main())
