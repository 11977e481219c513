"""What may follow each text under a grammar, worked out in other processes, beside a worker's loop.

A grammar is a program that a client sent: following it may take any time, and llguidance can be interrupted only with
its process. So each grammar has processes of its own (see `pool`). A text that takes too much ends with the reason, or
with its process; a text whose process ended for another reason goes on in a new one, which is told all of its outputs.
A worker asks for what follows a token, and takes what is known whenever it looks; it never waits.
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
"""Of a process's next word, where it owes one. Its CPU time is bounded elsewhere (`costs`)."""
LOAD_DEADLINE_S = 60.0
"""Of the model's tokens."""
MAX_WAIT_S = 30.0
"""Of a text for which there is no process, or no place for its mask."""
CHECK_S = 0.25
MAX_LOSSES = 3
"""Processes that end, one after the other, while a text waits for what follows one token."""


@dataclass(slots=True, eq=False)
class Ask(Generic[Owner]):
    """What an owner waits for."""

    owner: Owner
    follower: Follower
    text: Text
    asked_s: float
    process: Process | None = None  # that was told
    num_losses: int = 0
    fault: str = ""  # of the last loss


def make_followers(path: Path, vocab: int) -> "Followers[Any]":
    """For the model in directory `path`, of `vocab` tokens."""
    return Followers(lambda: ServerProcess(path, vocab))


class Followers(Generic[Owner]):
    """Follows grammars for owners, of which each asks for one thing at a time.

    Args:
        start: starts the process that has the model's tokens; called by `begin` or when it is first needed, and again
            when it ended.
    """

    def __init__(self, start: Callable[[], ServerProcess]) -> None:
        self._start = start
        self._pool: Pool | None = None
        self._started_s, self._checked_s, self._is_ready = 0.0, 0.0, False
        self._idle_look_s = 0.0
        self._problem = ""  # for which no grammar can be followed
        self._texts: weakref.WeakKeyDictionary[Follower, Text] = weakref.WeakKeyDictionary()
        self._num_texts = 0
        self._left: list[Text] = []  # whose followers are gone
        self._asks: dict[int, Ask[Owner]] = {}  # by text
        self._waiting: list[Ask[Owner]] = []  # of these, which no process has been told
        self._places: list[int] = []  # free
        self._outcomes: list[tuple[Owner, Outcome]] = []

    def begin(self) -> None:
        """Start what loads the model's tokens, so that the first text does not wait for it."""
        try:
            server = self._start()
        except OSError as error:
            logger.error("no process for grammars can be started: %s", error)
            self._end_all(f"no process for its grammar can be started: {error}")
            return
        self._pool, self._places = Pool(server), list(range(MAX_PLACES))
        self._started_s, self._is_ready = time.monotonic(), False

    def ask(self, owner: Owner, follower: Follower, token_ids: Sequence[int]) -> None:
        """Have it follow these tokens."""
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
        """What has become known since the last call; who has waited too long learns that.

        Without asks it looks now and then, so that a server that ended is no zombie, and the next text finds another.
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
        """Asked for and not taken."""
        return len(self._asks) + len(self._outcomes)

    def close(self) -> None:
        """End the processes."""
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
        """Processes what they do not know."""
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
        """Whether there is a process and a place for it."""
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
        """Look who has said nothing for too long, unless nobody has listened, as after a pause of the whole machine."""
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
        """A process is over; a problem is that of the text that it was at, and others go on in another."""
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
        """Begin anew, with all texts, as soon as one asks; without tokens there is no other server."""
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
    """What a grammar has done to its process; "" where somebody else ended it."""
    code = os.waitstatus_to_exitcode(status)
    if code in (0, -signal.SIGKILL):
        return ""
    if code == -signal.SIGPROF:
        return f"its grammar took far too much CPU time; {ADVICE}"
    if code in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS):
        return f"its grammar took too much memory; {ADVICE}"
    return f"following its grammar failed (exit status {code})"
