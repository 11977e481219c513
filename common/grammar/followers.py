"""Masks for texts under grammars, computed in other processes beside a worker's loop.

A grammar is a client's program: following a grammar may take any time, and llguidance can be interrupted only by ending
the process. So each grammar has its own processes (see `pool`). A text over the bounds ends with a reason, or with the
process. After any other end of a process, the text goes on in a new process, which gets all outputs so far. A worker
asks for the mask after a token, and later takes results without ever waiting.
"""

import logging
import os
import signal
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from common.grammar.costs import ADVICE
from common.grammar.follower import Follower, Outcome
from common.grammar.pool import MAX_PROCESSES, Pool, Process, Text
from common.grammar.records import MAX_PLACES, Job, Kind, Record
from common.grammar.server_process import ServerProcess

logger = logging.getLogger(__name__)

Owner = TypeVar("Owner")
DEADLINE_S = 10.0
"""Longest silence of a process with open jobs. CPU time is bounded in `costs`."""
LOAD_DEADLINE_S = 60.0
"""Longest time to load the model's tokens."""
MAX_WAIT_S = 30.0
"""Longest wait of a text for a process or a place for a mask."""
CHECK_S = 0.25
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


def make_followers(path: Path, vocab: int) -> "Followers[Any]":
    """Return followers for the model in directory `path`, with `vocab` tokens."""
    return Followers(lambda: ServerProcess(path, vocab))


class Followers(Generic[Owner]):
    """Follower of grammars for owners; an owner has at most a single open question.

    Args:
        start: starts the server process, by `begin` or on first need, and again after the server's end.
    """

    def __init__(self, start: Callable[[], ServerProcess]) -> None:
        self._start = start
        self._pool: Pool | None = None
        self._started_s, self._checked_s, self._is_ready = 0.0, 0.0, False
        self._idle_look_s = 0.0
        self._problem = ""  # permanent: no grammar can be followed
        self._texts: weakref.WeakKeyDictionary[Follower, Text] = weakref.WeakKeyDictionary()
        self._num_texts = 0
        self._left: list[Text] = []  # texts of deleted followers
        self._asks: dict[int, Ask[Owner]] = {}  # by text
        self._waiting: list[Ask[Owner]] = []  # asks without a process
        self._places: list[int] = []  # free places of masks
        self._outcomes: list[tuple[Owner, Outcome]] = []

    def begin(self) -> None:
        """Start the server, so the first text does not wait for loading the model's tokens."""
        try:
            server = self._start()
        except OSError as error:
            logger.error("no process for grammars can be started: %s", error)
            self._end_all(f"no process for its grammar can be started: {error}")
            return
        self._pool, self._places = Pool(server), list(range(MAX_PLACES))
        self._started_s, self._is_ready = time.monotonic(), False

    def ask(self, owner: Owner, follower: Follower, token_ids: Sequence[int]) -> None:
        """Let the follower follow the tokens; `take` returns the outcome later."""
        follower.token_ids.extend(token_ids)
        text = self._texts.get(follower) or self._text_of(follower)
        ask = Ask(owner, follower, text, time.monotonic())
        self._asks[text.number] = ask
        if self._problem:
            self._settle(ask, Outcome(problem=self._problem))
            return
        self._waiting.append(ask)
        self._tell()

    def take(self) -> list[tuple[Owner, Outcome]]:
        """Return outcomes since the last call; asks over a deadline get a problem.

        Without asks, look every `CHECK_S`, so an ended server is no zombie and the next text starts a new server.
        """
        now_s = time.monotonic()
        if self._asks:
            self._hear()
            self._check(now_s)
            self._tell()
        elif self._pool is not None and now_s > self._idle_look_s + CHECK_S:
            self._idle_look_s = now_s
            self._hear()
        taken, self._outcomes = self._outcomes, []
        return taken

    @property
    def num_pending(self) -> int:
        """Number of asks without a taken outcome."""
        return len(self._asks) + len(self._outcomes)

    def close(self) -> None:
        """End the server and all processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool.server.end()
            self._pool = None

    def _text_of(self, follower: Follower) -> Text:
        self._num_texts += 1
        text = self._texts[follower] = Text(self._num_texts)
        weakref.finalize(follower, self._left.append, text).atexit = False
        return text

    def _tell(self) -> None:
        """Send news to processes: ends of texts, and asks without a process."""
        if self._pool is None and self._asks:
            self.begin()
        if self._pool is None:
            return
        if self._left:
            for text in self._left:
                text.leave()
            self._left.clear()
            self._pool.trim()
        try:
            self._waiting = [ask for ask in self._waiting if not self._tell_one(ask, self._pool)]
        except OSError as error:
            self._lose_server(f"the server for grammars cannot be asked: {error}")
            return
        self._pool.flush()

    def _tell_one(self, ask: Ask[Owner], pool: Pool) -> bool:
        """Send an ask to a process; return false without a process or a place for the mask."""
        text, token_ids, now_s = ask.text, ask.follower.token_ids, time.monotonic()
        if not self._places:
            return False
        if text.process is None or not text.process.is_open:
            process = pool.process_for(ask.follower.grammar)
            if process is None:
                return False
            process.num_texts += 1
            text.process, text.num_told = process, 0
        ask.process, place = text.process, self._places.pop()
        job = Job(text.number, place, tuple(ask.follower.stop_token_ids), token_ids[text.num_told :])
        text.num_told = len(token_ids)
        if not ask.process.due:
            ask.process.heard_s = now_s
        ask.process.due.append((text.number, place))
        ask.process.send(job.pack())
        return True

    def _hear(self) -> None:
        if self._pool is None:
            return
        try:
            records = self._pool.server.records()
        except EOFError as error:
            self._lose_server(str(error))
            return
        for record in records:
            self._heed(record, self._pool)

    def _heed(self, record: Record, pool: Pool) -> None:
        process = pool.find(record.process)
        match record.kind:
            case Kind.READY:
                self._is_ready = True
                for each in pool:
                    each.heard_s = time.monotonic()
                logger.info("ready for grammars; that took %.1f s", record.number / 1e3)
                if record.told:
                    logger.warning("%s", record.told)
            case Kind.FAILED:
                self._problem = f"this worker can follow no grammars: {record.told}"
                logger.error("%s", self._problem)
                self._end_all(self._problem)
            case Kind.FORKED if process is not None:
                process.is_forked, process.heard_s = True, time.monotonic()
            case Kind.ENDED if process is not None:
                pool.forget(process)
                silence = f"its grammar said nothing for {DEADLINE_S:g} s" if process.is_doomed else ""
                self._lose(process, record.told or _fault(record.number) or silence)
                self._places += [place for _, place in process.due]
            case _ if process is not None:
                number, place = process.due.popleft()
                process.heard_s, process.is_heavy = time.monotonic(), record.is_heavy
                ask = self._asks.get(number)
                if ask is not None and ask.process is process:
                    self._settle(ask, _outcome(record, pool, place))
                self._places.append(place)

    def _check(self, now_s: float) -> None:
        """End silent processes and servers, except after a pause of the worker itself, such as a suspended machine."""
        if self._pool is None or now_s < self._checked_s + CHECK_S:
            return
        has_listened, self._checked_s = now_s < self._checked_s + DEADLINE_S / 2, now_s
        if not has_listened:
            for process in self._pool:
                process.heard_s = now_s
        for ask in [ask for ask in self._waiting if now_s > ask.asked_s + MAX_WAIT_S]:
            self._waiting.remove(ask)
            problem = f"{MAX_PROCESSES} grammars and {MAX_PLACES} texts are followed here, and none ended; retry later"
            self._settle(ask, Outcome(problem=problem))
        if not self._is_ready:
            if now_s > self._started_s + LOAD_DEADLINE_S:
                self._lose_server(f"no tokens for grammars after {LOAD_DEADLINE_S:g} s")
            return
        silent = [process for process in self._pool if process.due and now_s > process.heard_s + DEADLINE_S]
        if any(not process.is_forked or process.is_doomed for process in silent):
            self._lose_server(f"the server for grammars did nothing for {DEADLINE_S:g} s")
            return
        for process in silent:
            process.is_doomed, process.heard_s = True, now_s
            self._pool.server.kill(process.number)

    def _lose(self, process: Process, problem: str) -> None:
        """Handle the end of a process: `problem` fails the current text, and other texts go on in a new process."""
        lost = [self._asks[number] for number, _ in process.due if number in self._asks]
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
                self._waiting.append(ask)

    def _lose_server(self, problem: str) -> None:
        """End the server; the next ask starts a new server, unless the model's tokens cannot be loaded."""
        if self._pool is None:
            return
        if not self._problem:
            logger.error("%s; the next text starts another", problem)
        pool, self._pool = self._pool, None
        pool.server.end(at_once=True)
        for process in pool:
            pool.forget(process)
            self._lose(process, "")

    def _settle(self, ask: Ask[Owner], outcome: Outcome) -> None:
        del self._asks[ask.text.number]
        self._outcomes.append((ask.owner, outcome))

    def _end_all(self, problem: str) -> None:
        self._waiting.clear()
        for ask in list(self._asks.values()):
            self._settle(ask, Outcome(problem=problem))


def _outcome(record: Record, pool: Pool, place: int) -> Outcome:
    if record.kind is Kind.MASK:
        return Outcome(np.frombuffer(pool.server.masks.read(place), np.int32).copy())
    return Outcome(is_over=record.kind is Kind.OVER, problem=record.told)


def _fault(status: int) -> str:
    """Return the grammar's fault by the wait status of a process; "" for a normal end or a SIGKILL."""
    code = os.waitstatus_to_exitcode(status)
    if code in (0, -signal.SIGKILL):
        return ""
    if code == -signal.SIGPROF:
        return f"its grammar took far too much CPU time; {ADVICE}"
    if code in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS):
        return f"its grammar took too much memory; {ADVICE}"
    return f"following its grammar failed (exit status {code})"
