"""A process that follows texts under a grammar.

`common.grammar.follower_server` forks the process after loading the model's tokens, so a start costs milliseconds. A
grammar with too much time or memory harms only a single process, never texts of other grammars.
"""

import contextlib
import ctypes
import os
import resource
import signal
import threading
import time
from typing import NoReturn

import llguidance

from common.base.process import limit_memory
from common.grammar.costs import Costs, TextCost, end_limit, limit_compiling, limit_job
from common.grammar.grammars import Grammars
from common.grammar.records import Job, Kind, Masks, Record, messages
from common.grammar.text_matcher import TextMatcher

MEMORY_BYTES = 256 << 20
"""Memory limit of a grammar and all texts under the grammar."""
GROWTH_BYTES = 32 << 20
"""Most growth of a process before it counts as heavy."""
STACK_BYTES = 16 << 20
"""Stack, because llguidance recurses; larger than in `router.grammar.grammar_main`, so accepted grammars fit."""
BUG = 1
"""Exit status."""
PR_SET_PDEATHSIG = 1
OOM_SCORE = "/proc/self/oom_score_adj"
LIBC = ctypes.CDLL(None)


def live(process: "FollowerProcess", jobs: int, parent: int, in_use: int) -> NoReturn:
    """Run in a forked child: work until the pipe `jobs` ends, then exit.

    Args:
        parent: pid of the server; the child ends with the server.
        in_use: bytes mapped by the server.
    """
    status = BUG
    try:
        LIBC.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if os.getppid() == parent:
            _be_first_oom_victim()
            limit_memory(MEMORY_BYTES, in_use)
            threading.stack_size(STACK_BYTES)
            thread = threading.Thread(target=process.run, args=(jobs,))
            thread.start()
            thread.join()
            status = 0 if process.is_done else BUG
    finally:
        os._exit(status)


class FollowerProcess:
    """A follower of texts, with a single grammar at a time; jobs run in order."""

    def __init__(self, number: int, grammars: Grammars, masks: Masks, records: int) -> None:
        self._number, self._grammars, self._masks, self._records = number, grammars, masks, records
        self._matcher: llguidance.LLMatcher | None = None
        self._texts: dict[int, tuple[TextMatcher, TextCost]] = {}
        self._costs = Costs()
        self._most_kib = _resident_kib() + GROWTH_BYTES // 1024
        self.is_done = False

    def run(self, jobs: int) -> None:
        """Work until the pipe `jobs` ends, or until the reader of records is gone."""
        with contextlib.suppress(BrokenPipeError):
            for message in messages(jobs):
                if isinstance(message, Job):
                    self._do(message)
                else:
                    self._compile(message)
        self.is_done = True

    def _compile(self, grammar: str) -> None:
        self._texts.clear()
        self._matcher, self._costs = None, Costs()
        limit_compiling()
        self._matcher = self._grammars.compile(grammar)
        end_limit()

    def _do(self, job: Job) -> None:
        if job.place < 0:
            self._texts.pop(job.text, None)
            return
        begin_s, num_tokens = time.thread_time(), len(job.token_ids)
        limit_job(num_tokens)
        text, cost = self._texts.get(job.text) or self._begin(job)
        kind, reason = text.follow(job.token_ids, self._masks, job.place)
        end_limit()
        problem = self._costs.objection(cost, num_tokens, time.thread_time() - begin_s)
        if problem and kind is Kind.MASK:
            kind, reason = Kind.PROBLEM, problem
        is_heavy = self._costs.is_niced or _resident_kib() > self._most_kib
        os.write(self._records, Record(kind, self._number, job.text, reason, is_heavy).pack())

    def _begin(self, job: Job) -> tuple[TextMatcher, TextCost]:
        assert self._matcher is not None, "its grammar comes first"
        text = TextMatcher(self._grammars, self._matcher.deep_copy(), job.stop_token_ids)
        self._texts[job.text] = begun = text, TextCost()
        return begun


def _resident_kib() -> int:
    """Return the peak resident memory of the process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _be_first_oom_victim() -> None:
    """Make the process the kernel's first victim when memory runs out, because the worker can replace the process."""
    with contextlib.suppress(OSError), open(OOM_SCORE, "wb", buffering=0) as file:
        file.write(b"1000")
