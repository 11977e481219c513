"""Which process follows which grammar: its worker's end of each."""

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from common.grammar.records import Job, pack_grammar
from common.grammar.server_process import ServerProcess

MAX_PROCESSES = 256
"""One that owes nothing gives way where another is needed: its texts begin anew when they go on."""
KEPT_IDLE, MAX_IDLE = 8, 16
"""Without texts: their grammars are kept for texts to come. Of more the oldest gets the next grammar, as a process that
is there has it compiled some 5 ms sooner than one that is yet to be forked; of too many the oldest ends."""
MANY_TEXTS = 8
"""Of one process, before its grammar gets another."""
MAX_OF_GRAMMAR = max(1, min(4, len(os.sched_getaffinity(0)) - 1))


@dataclass(slots=True, eq=False)
class Process:
    """Follows texts under one grammar at a time."""

    number: int
    pipe: int  # for messages; -1 once it is closed
    heard_s: float  # when it last said something, or began to owe something
    grammar: str = ""  # "" if it never had one
    due: deque[tuple[int, int]] = field(default_factory=deque)  # texts that it owes a word, in this order, and places
    unsent: bytearray = field(default_factory=bytearray)
    num_texts: int = 0
    is_forked: bool = False
    is_heavy: bool = False  # it has become slow or large, and gets no other grammar
    is_doomed: bool = False  # its end was asked for, as it said nothing

    @property
    def is_open(self) -> bool:
        return self.pipe >= 0

    @property
    def is_idle(self) -> bool:
        return self.is_open and not self.num_texts and not self.due

    def send(self, data: bytes) -> None:
        """Write, or keep what there is no room for until `flush`."""
        self.unsent += data
        self.flush()

    def flush(self) -> None:
        if self.unsent and self.is_open:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):  # of its end the server tells
                del self.unsent[: os.write(self.pipe, self.unsent)]

    def close(self) -> None:
        """Let it end when it has read all."""
        if self.is_open:
            os.close(self.pipe)
            self.pipe = -1


@dataclass(slots=True, eq=False)
class Text:
    """What processes know of a text."""

    number: int
    process: Process | None = None
    num_told: int = 0  # outputs

    def leave(self) -> None:
        """It has ended."""
        if self.process is not None and self.process.is_open:
            self.process.num_texts -= 1
            self.process.send(Job(self.number).pack())


class Pool:
    """All processes of one server. Once there was a grammar one more waits for the next."""

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
        """Choose one for another text, and have it forked if need be; None where no more can be. Raises OSError."""
        its = self._of_grammar.get(grammar, [])
        chosen = min(its, key=lambda process: (process.is_heavy, process.num_texts), default=None)
        if chosen is None:
            return self._with(grammar)
        if (chosen.is_heavy or chosen.num_texts >= MANY_TEXTS) and len(its) < MAX_OF_GRAMMAR:
            return self._with(grammar) or chosen
        return chosen

    def retire(self, process: Process) -> None:
        """Give it no more texts, and let it end."""
        if process.is_open:
            process.close()
            self._unname(process)

    def forget(self, process: Process) -> None:
        """It has ended."""
        self.retire(process)
        del self._processes[process.number]

    def trim(self) -> None:
        """Let processes without texts end that are too many to be kept, or too heavy."""
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
        """One that nobody needs, a new one, or None; now it has this grammar."""
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
        """Those that have a grammar and no text, the oldest first."""
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
        """A new one, in the place of one that owes nothing if there are too many; None if all do."""
        if not self._has_room():
            at_leisure = (process for process in self if process.is_open and process.grammar and not process.due)
            if (oldest := min(at_leisure, key=lambda process: process.heard_s, default=None)) is None:
                return None
            self.retire(oldest)
        self._num_forked += 1
        process = Process(self._num_forked, self.server.fork(self._num_forked), time.monotonic())
        self._processes[process.number] = process
        return process
