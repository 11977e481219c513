"""A worker's open questions for masks, and their outcomes."""

import logging
import time
from dataclasses import dataclass
from typing import Generic, TypeVar

from common.grammar.follower import Follower, Outcome
from common.grammar.processes import Process, Text

logger = logging.getLogger(__name__)

Owner = TypeVar("Owner")
MAX_WAIT_S = 60.0
"""Longest wait of a text for a process or a place for a mask; longer than a server may load."""
MAX_LOSSES = 3
"""Processes lost in a row while a text waits for a mask."""


@dataclass(slots=True, eq=False)
class Ask(Generic[Owner]):
    """An owner's open question: the mask after a text's outputs."""

    owner: Owner
    follower: Follower
    text: Text
    asked_s: float
    process: Process | None = None  # has the job
    num_losses: int = 0
    fault: str = ""  # reason of the last loss


class Asks(Generic[Owner]):
    """Open questions, at most one of each text, and outcomes until taken."""

    def __init__(self) -> None:
        self._open: dict[int, Ask[Owner]] = {}  # by text
        self.waiting: list[Ask[Owner]] = []  # without a process
        self._outcomes: list[tuple[Owner, Outcome]] = []

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_pending(self) -> int:
        """Number of questions without a taken outcome."""
        return len(self._open) + len(self._outcomes)

    def add(self, owner: Owner, follower: Follower, text: Text) -> None:
        """Add a question, which waits for a process."""
        ask = self._open[text.number] = Ask(owner, follower, text, time.monotonic())
        self.waiting.append(ask)

    def take(self) -> list[tuple[Owner, Outcome]]:
        """Return outcomes since the last call."""
        taken, self._outcomes = self._outcomes, []
        return taken

    def answer(self, number: int, process: Process, outcome: Outcome) -> None:
        """Settle a text's question with its process's answer; an answer to an earlier process's job is ignored."""
        ask = self._open.get(number)
        if ask is not None and ask.process is process:
            self._settle(ask, outcome)

    def end_all(self, problem: str) -> None:
        """Settle all questions with a problem of the worker."""
        self.waiting.clear()
        for ask in list(self._open.values()):
            self._settle(ask, Outcome(problem=problem, is_workers=True))

    def end_late(self, now_s: float, problem: str) -> None:
        """Settle questions that have waited too long with a problem of the worker."""
        for ask in [ask for ask in self.waiting if now_s > ask.asked_s + MAX_WAIT_S]:
            self.waiting.remove(ask)
            self._settle(ask, Outcome(problem=problem, is_workers=True))

    def lose(self, process: Process, problem: str) -> None:
        """Handle the end of a process: `problem` fails the current text, and other texts go on in a new process."""
        lost = [self._open[number] for number, _ in process.due if number in self._open]
        for i, ask in enumerate(ask for ask in lost if ask.process is process):
            ask.process = None
            ask.num_losses += 1
            ask.fault = problem or ask.fault
            if problem and i == 0:
                logger.warning("a process for grammars ended: %s", problem)
                self._settle(ask, Outcome(problem=problem))
            elif ask.num_losses >= MAX_LOSSES:
                reason = f"{MAX_LOSSES} processes in a row ended that followed its grammar"
                self._settle(ask, Outcome(problem=f"{reason}: {ask.fault}" if ask.fault else reason))
            else:
                self.waiting.append(ask)

    def _settle(self, ask: Ask[Owner], outcome: Outcome) -> None:
        del self._open[ask.text.number]
        self._outcomes.append((ask.owner, outcome))
