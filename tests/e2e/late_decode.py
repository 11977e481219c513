"""`python -m tests.e2e.late_decode`: a decode worker that gets a mask after a step has missed it, and says so."""

import logging
import sys
from pathlib import Path
from typing import Any

from common.grammar.follower import Outcome
from common.grammar.followers import Followers
from common.grammar.server_process import ServerProcess
from common.serving.worker.start import worker_main
from common.settings.config import WORKER_SECTIONS
from common.wire.messages.worker import Role
from decode_worker import __main__ as program
from decode_worker.sequences.sequence import DecodeSequence
from decode_worker.sequences.slots import Slots

MOST_TURNS = 100
"""Turns of the worker's loop, after which a sequence without steps gets its mask all the same."""

logger = logging.getLogger(__name__)


class LateFollowers(Followers[Any]):
    """Hands out the outcome of a sequence after a step without the mask."""

    def __init__(self, path: Path, vocab: int) -> None:
        super().__init__(lambda: ServerProcess(path, vocab))
        self.held: list[tuple[int, tuple[Any, Outcome]]] = []
        self.num_calls = 0

    def take(self) -> list[tuple[Any, Outcome]]:
        self.num_calls += 1
        self.held += [(self.num_calls + MOST_TURNS, each) for each in super().take()]
        due = [(call, each) for call, each in self.held if each[0].mask_slot.num_late or call <= self.num_calls]
        self.held = [held for held in self.held if held not in due]
        return [each for _, each in due]

    @property
    def num_pending(self) -> int:
        return super().num_pending + len(self.held)


def main() -> int:
    was_late = Slots.was_late

    def say_late(slots: Slots, sequence: DecodeSequence) -> None:
        logger.warning("a mask was late")
        was_late(slots, sequence)

    Slots.was_late = say_late  # type: ignore[assignment, method-assign]
    program.make_followers = LateFollowers  # type: ignore[attr-defined]
    return worker_main(Role.DECODE, WORKER_SECTIONS, program.DESCRIPTION, program.build)


if __name__ == "__main__":
    sys.exit(main())
