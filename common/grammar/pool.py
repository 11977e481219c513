"""The processes that follow grammars for a worker, and the choice of a process for each text."""

import os
import time
from collections.abc import Iterator

from common.grammar.processes import Process
from common.grammar.records import pack_grammar
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


class Pool:
    """All processes of a server. After the first grammar, a spare process waits for the next grammar."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.processes: dict[int, Process] = {}  # by number
        self._of_grammar: dict[str, list[Process]] = {}
        self._spare: Process | None = None
        self._num_forked = 0

    def __iter__(self) -> Iterator[Process]:
        return iter(list(self.processes.values()))

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
        del self.processes[process.number]

    def trim(self) -> None:
        """Let idle processes end that are heavy or above `MAX_IDLE`."""
        idle = self._idle()
        surplus = idle[: max(0, len(idle) - MAX_IDLE)]
        for process in {*surplus, *(process for process in idle if process.is_heavy)}:
            self.retire(process)

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
        return sum(process.is_open for process in self.processes.values()) < MAX_PROCESSES

    def _forked(self) -> Process | None:
        """Fork a process. At the limit retire the oldest process without an open job; return None if all have jobs."""
        if not self._has_room():
            at_leisure = (process for process in self if process.is_open and process.grammar and not process.due)
            if (oldest := min(at_leisure, key=lambda process: process.heard_s, default=None)) is None:
                return None
            self.retire(oldest)
        self._num_forked += 1
        process = Process(self._num_forked, self.server.fork(self._num_forked), time.monotonic())
        self.processes[process.number] = process
        return process
