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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic

import numpy as np

from common.grammar.asks import Ask, Asks, Owner
from common.grammar.costs import ADVICE
from common.grammar.follower import Follower, Outcome
from common.grammar.pool import MAX_PROCESSES, Pool
from common.grammar.processes import Texts
from common.grammar.records import MAX_PLACES, Job, Kind, Record
from common.grammar.server_process import ServerProcess

logger = logging.getLogger(__name__)

DEADLINE_S = 10.0
"""Longest silence of a process with open jobs. CPU time is bounded in `costs`."""
LOAD_DEADLINE_S = 30.0
"""Longest time to load the model's tokens; then another server begins."""
CHECK_S = 0.25


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
        self._texts = Texts()
        self._asks = Asks[Owner]()
        self._places: list[int] = []  # free places of masks

    def begin(self) -> None:
        """Start the server, so the first text does not wait for loading the model's tokens."""
        try:
            server = self._start()
        except OSError as error:
            logger.error("no process for grammars can be started: %s", error)
            self._asks.end_all(f"no process for its grammar can be started: {error}")
            return
        self._pool, self._places = Pool(server), list(range(MAX_PLACES))
        self._started_s, self._is_ready = time.monotonic(), False

    def ask(self, owner: Owner, follower: Follower, token_ids: Sequence[int]) -> None:
        """Let the follower follow the tokens; `take` returns the outcome later."""
        follower.token_ids.extend(token_ids)
        self._asks.add(owner, follower, self._texts.of(follower))
        if self._problem:
            self._asks.end_all(self._problem)
        else:
            self._send()

    def take(self) -> list[tuple[Owner, Outcome]]:
        """Return outcomes since the last call; asks over a deadline get a problem.

        Without asks, look every `CHECK_S`, so an ended server is no zombie and the next text starts a new server.
        """
        now_s = time.monotonic()
        if self._asks.num_open:
            self._receive()
            self._check(now_s)
            self._send()
        elif self._pool is not None and now_s > self._idle_look_s + CHECK_S:
            self._idle_look_s = now_s
            self._receive()
        return self._asks.take()

    @property
    def num_pending(self) -> int:
        """Number of asks without a taken outcome."""
        return self._asks.num_pending

    def close(self) -> None:
        """End the server and all processes."""
        if self._pool is not None:
            for process in self._pool:
                process.close()
            self._pool.server.end()
            self._pool = None

    def _send(self) -> None:
        """Send processes the ends of texts, and questions without a process."""
        if self._pool is None and self._asks.num_open:
            self.begin()
        if self._pool is None:
            return
        if self._texts.report_ended():
            self._pool.trim()
        try:
            self._asks.waiting = [ask for ask in self._asks.waiting if not self._send_job(ask, self._pool)]
        except OSError as error:
            self._lose_server(f"the server for grammars cannot be asked: {error}")
            return
        for process in self._pool:
            process.flush()

    def _send_job(self, ask: Ask[Owner], pool: Pool) -> bool:
        """Send a question to a process; return false without a process or a place for the mask."""
        text, token_ids, now_s = ask.text, ask.follower.token_ids, time.monotonic()
        if not self._places:
            return False
        if text.process is None or not text.process.is_open:
            process = pool.process_for(ask.follower.grammar)
            if process is None:
                return False
            process.num_texts += 1
            text.process, text.num_sent = process, 0
        ask.process, place = text.process, self._places.pop()
        job = Job(text.number, place, tuple(ask.follower.stop_token_ids), token_ids[text.num_sent :])
        text.num_sent = len(token_ids)
        if not ask.process.due:
            ask.process.heard_s = now_s
        ask.process.due.append((text.number, place))
        ask.process.send(job.pack())
        return True

    def _receive(self) -> None:
        if self._pool is None:
            return
        try:
            records = self._pool.server.records()
        except EOFError as error:
            self._lose_server(str(error))
            return
        for record in records:
            self._handle(record, self._pool)

    def _handle(self, record: Record, pool: Pool) -> None:
        process = pool.processes.get(record.process)
        match record.kind:
            case Kind.READY:
                self._is_ready = True
                for each in pool:
                    each.heard_s = time.monotonic()
                logger.info("ready for grammars; that took %.1f s", record.number / 1e3)
                if record.text:
                    logger.warning("%s", record.text)
            case Kind.FAILED:
                self._problem = f"this worker can follow no grammars: {record.text}"
                logger.error("%s", self._problem)
                self._asks.end_all(self._problem)
            case Kind.FORKED if process is not None:
                process.is_forked, process.heard_s = True, time.monotonic()
            case Kind.ENDED if process is not None:
                pool.forget(process)
                silence = f"its grammar said nothing for {DEADLINE_S:g} s" if process.is_killed else ""
                self._asks.lose(process, record.text or _fault(record.number) or silence)
                self._places += [place for _, place in process.due]
            case _ if process is not None:
                number, place = process.due.popleft()
                process.heard_s, process.is_heavy = time.monotonic(), record.is_heavy
                self._asks.answer(number, process, _outcome(record, pool, place))
                self._places.append(place)

    def _check(self, now_s: float) -> None:
        """End silent processes and servers, except after a pause of the worker itself, such as a suspended machine."""
        if self._pool is None or now_s < self._checked_s + CHECK_S:
            return
        has_listened, self._checked_s = now_s < self._checked_s + DEADLINE_S / 2, now_s
        if not has_listened:
            for process in self._pool:
                process.heard_s = now_s
        problem = f"{MAX_PROCESSES} grammars and {MAX_PLACES} texts are followed here, and none ended; retry later"
        self._asks.end_late(now_s, problem)
        if not self._is_ready:
            if now_s > self._started_s + LOAD_DEADLINE_S:
                self._lose_server(f"no tokens for grammars after {LOAD_DEADLINE_S:g} s")
            return
        silent = [process for process in self._pool if process.due and now_s > process.heard_s + DEADLINE_S]
        if any(not process.is_forked or process.is_killed for process in silent):
            self._lose_server(f"the server for grammars did nothing for {DEADLINE_S:g} s")
            return
        for process in silent:
            process.is_killed, process.heard_s = True, now_s
            self._pool.server.kill(process.number)

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
            self._asks.lose(process, "")


def _outcome(record: Record, pool: Pool, place: int) -> Outcome:
    if record.kind is Kind.MASK:
        return Outcome(np.frombuffer(pool.server.masks.read(place), np.int32).copy())
    return Outcome(is_over=record.kind is Kind.OVER, problem=record.text)


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
