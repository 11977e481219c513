"""A worker's ends of the processes that follow grammars, and the choice of a process for each text."""

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from common.grammar.records import Job, pack_grammar
from common.grammar.server_process import ServerProcess

MAX_PROCESSES = 256
"""At the limit the oldest process without an open job ends for a new process; its texts begin anew."""
KEPT_IDLE, MAX_IDLE = 8, 16
"""Idle processes keep their grammars for later texts.

Above `KEPT_IDLE` the oldest gets the next grammar, because forking takes 5 ms longer. Above `MAX_IDLE` the oldest ends.
"""
MANY_TEXTS = 8
"""Texts of a process, before the grammar gets a further process."""
MAX_OF_GRAMMAR = max(1, min(4, len(os.sched_getaffinity(0)) - 1))


@dataclass(slots=True, eq=False)
class Process:
    """A process that follows texts under a grammar; a later grammar may replace the first."""

    number: int
    pipe: int  # for messages; -1 once closed
    heard_s: float  # time of the last record, or of the first open job
    grammar: str = ""  # "" before the first grammar
    due: deque[tuple[int, int]] = field(default_factory=deque)  # (text, place) of open jobs, in order of answers
    unsent: bytearray = field(default_factory=bytearray)
    num_texts: int = 0
    is_forked: bool = False
    is_heavy: bool = False  # slow or large, so never gets a new grammar
    is_doomed: bool = False  # to be killed, because of silence

    @property
    def is_open(self) -> bool:
        return self.pipe >= 0

    @property
    def is_idle(self) -> bool:
        return self.is_open and not self.num_texts and not self.due

    def send(self, data: bytes) -> None:
        """Write; bytes without room in the pipe wait for `flush`."""
        self.unsent += data
        self.flush()

    def flush(self) -> None:
        if self.unsent and self.is_open:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):  # the server reports the end
                del self.unsent[: os.write(self.pipe, self.unsent)]

    def close(self) -> None:
        """Close the pipe; the process ends after reading the rest."""
        if self.is_open:
            os.close(self.pipe)
            self.pipe = -1


@dataclass(slots=True, eq=False)
class Text:
    """A text's process, and the outputs known there."""

    number: int
    process: Process | None = None
    num_told: int = 0  # outputs

    def leave(self) -> None:
        """Tell the process about the end of the text."""
        if self.process is not None and self.process.is_open:
            self.process.num_texts -= 1
            self.process.send(Job(self.number).pack())


class Pool:
    """All processes of a server. After the first grammar, a spare process waits for the next grammar."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self._processes: dict[int, Process] = {}
        self._of_grammar: dict[str, list[Process]] = {}
        self._spare: Process | None = None
        self._num_forked = 0

    def __iter__(self) -> Iterator[Process]:
        return iter(list(self._processes.values()))

    def find(self, number: int) -> Process | None:
        return self._processes.get(number)

    def process_for(self, grammar: str) -> Process | None:
        """Choose a process for a text, forked if necessary; None at the limit. Raises OSError without a server."""
        its = self._of_grammar.get(grammar, [])
        chosen = min(its, key=lambda process: (process.is_heavy, process.num_texts), default=None)
        if chosen is None:
            return self._with(grammar)
        if (chosen.is_heavy or chosen.num_texts >= MANY_TEXTS) and len(its) < MAX_OF_GRAMMAR:
            return self._with(grammar) or chosen
        return chosen

    def retire(self, process: Process) -> None:
        """Give a process no more texts, and let the process end."""
        if process.is_open:
            process.close()
            self._unname(process)

    def forget(self, process: Process) -> None:
        """Forget an ended process."""
        self.retire(process)
        del self._processes[process.number]

    def trim(self) -> None:
        """Let idle processes end that are heavy or above `MAX_IDLE`."""
        idle = self._idle()
        surplus = idle[: max(0, len(idle) - MAX_IDLE)]
        for process in {*surplus, *(process for process in idle if process.is_heavy)}:
            self.retire(process)

    def flush(self) -> None:
        for process in self._processes.values():
            process.flush()

    def close(self) -> None:
        for process in self:
            process.close()

    def _with(self, grammar: str) -> Process | None:
        """Give the grammar to an idle process, the spare or a new process; return None if there is none."""
        idle = [process for process in self._idle() if not process.is_heavy]
        if len(idle) > KEPT_IDLE:
            process = idle[0]
            self._unname(process)
        elif (spare := self._spare) is not None and spare.is_open:
            process, self._spare = spare, None
        elif (forked := self._forked()) is not None:
            process = forked
        else:
            return None
        process.grammar = grammar
        self._of_grammar.setdefault(grammar, []).append(process)
        process.send(pack_grammar(grammar))
        if self._spare is None and self._has_room():
            self._spare = self._forked()
        return process

    def _idle(self) -> list[Process]:
        """Return processes with a grammar and no text, the oldest first."""
        idle = [process for process in self if process.is_idle and process.grammar]
        return sorted(idle, key=lambda process: process.heard_s)

    def _unname(self, process: Process) -> None:
        if process is self._spare:
            self._spare = None
        its = self._of_grammar.get(process.grammar, [])
        if process in its:
            its.remove(process)
        if not its:
            self._of_grammar.pop(process.grammar, None)

    def _has_room(self) -> bool:
        return sum(process.is_open for process in self._processes.values()) < MAX_PROCESSES

    def _forked(self) -> Process | None:
        """Fork a process. At the limit retire the oldest process without an open job; return None if all have jobs."""
        if not self._has_room():
            at_leisure = (process for process in self if process.is_open and process.grammar and not process.due)
            if (oldest := min(at_leisure, key=lambda process: process.heard_s, default=None)) is None:
                return None
            self.retire(oldest)
        self._num_forked += 1
        process = Process(self._num_forked, self.server.fork(self._num_forked), time.monotonic())
        self._processes[process.number] = process
        return process
