"""`python -m router.grammar.grammar_main`: the process that compiles grammars for a router, from stdin to stdout.

A grammar is compiled in a child process, forked once the model's tokens are loaded, so a fork costs milliseconds. The
kernel ends a child at its limit of CPU time or memory. A killed child costs a single grammar; others compile
concurrently.
"""

import json
import logging
import os
import selectors
import signal
import threading
import time
import warnings
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark
from msgspec import msgpack

from common.base.json_file import Json
from common.base.process import freeze_and_trim, limit_memory
from common.checkpoint.files import open_model, text_config
from common.grammar.end_tokens import end_token_ids
from common.grammar.grammars import Grammars
from common.grammar.reasons import reason, shortened
from router.base.helper_frames import GRAMMAR
from router.base.helper_start import start_helper
from router.grammar.dialect import Dialect
from router.grammar.source import CompileResult, GrammarSource, grammar_of
from router.grammar.tokens import lean_tokens
from router.text.formats.shapes import MARKS

logger = logging.getLogger(__name__)

CPU_S = 0.5
"""Limit for a grammar; real grammars take milliseconds."""
WALL_S = 5.0
"""Limit for a grammar on a busy machine, or for a blocked child."""
MAX_CHILDREN = 8
MEMORY_BYTES = 256 << 20
"""Limit for a grammar."""
STACK_BYTES = 2 << 20
"""Stack for a grammar. Workers have more, so no grammar compiled here overflows there."""
READ_BYTES = 1 << 16
MAX_DROPPED = 32
"""Keywords of a schema listed in a response."""
BUSY = (signal.SIGALRM, signal.SIGKILL)
"""Signals that end a child of a busy machine: at `WALL_S`, or for want of memory."""
TOO_MUCH = "it is too much to compile: make it smaller or simpler"


@dataclass(slots=True)
class Child:
    """A grammar being compiled."""

    number: int
    pid: int
    reply: bytearray = field(default_factory=bytearray)


class Compiler:
    """Forks children and collects their results."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._dialect = dialect_of(grammars)
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._input = bytearray()
        self._jobs: deque[tuple[int, bytes]] = deque()
        self._children: dict[int, Child] = {}  # by the read end of the reply's pipe

    def run(self) -> None:
        """Serve until stdin ends; children end as well."""
        while True:
            for key, _ in self._selector.select():
                data = os.read(key.fd, READ_BYTES)
                if key.fd == 0 and not data:
                    return
                self._received(data) if key.fd == 0 else self._replied(key.fd, data)
            while self._jobs and len(self._children) < MAX_CHILDREN:
                self._fork(*self._jobs.popleft())

    def _received(self, data: bytes) -> None:
        self._input += data
        while len(self._input) >= GRAMMAR.size:
            number, num_bytes = GRAMMAR.unpack_from(self._input)
            if len(self._input) < GRAMMAR.size + num_bytes:
                return
            self._jobs.append((number, bytes(self._input[GRAMMAR.size : GRAMMAR.size + num_bytes])))
            del self._input[: GRAMMAR.size + num_bytes]

    def _fork(self, number: int, packed: bytes) -> None:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            _compile(self._grammars, self._dialect, packed, write_end)
        os.close(write_end)
        self._children[read_end] = Child(number, pid)
        self._selector.register(read_end, selectors.EVENT_READ)

    def _replied(self, pipe: int, data: bytes) -> None:
        child = self._children[pipe]
        child.reply += data
        if data:
            return
        self._selector.unregister(pipe)
        os.close(pipe)
        del self._children[pipe]
        _, status = os.waitpid(child.pid, 0)
        is_unknown = os.WIFSIGNALED(status) and os.WTERMSIG(status) in BUSY
        reply = bytes(child.reply) if status == 0 else b""
        reply = reply or msgpack.encode(CompileResult(problem="" if is_unknown else TOO_MUCH))
        _write(1, GRAMMAR.pack(child.number, len(reply)) + reply)


def main() -> None:
    """Compile until stdin ends."""
    config = start_helper("router.grammar.grammar_main", ("model", "router", "log"), __doc__ or "", "router-grammars")
    # The warning is about the library's threads for batches, which children neither have nor need.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    path = Path(config.model.path)
    files = open_model(path)
    vocab = text_config(files)["vocab_size"]
    begin_s = time.monotonic()
    grammars = Grammars(lean_tokens(path, vocab, end_token_ids(files)))
    freeze_and_trim()
    logger.info("ready for grammars after %.1f s", time.monotonic() - begin_s)
    Compiler(grammars).run()


def dialect_of(grammars: Grammars) -> Dialect:
    """Return the dialect for the model's tokens."""
    special = grammars.special_tokens
    return Dialect(any_to_lark, {mark: special[mark] for mark in MARKS if mark in special})


def compiled(source: GrammarSource, grammars: Grammars, dialect: Dialect) -> CompileResult:
    """Compile a client's grammar, and check that some token can begin a text."""

    def refusal(schema: Json) -> str:
        return _problem(grammars.compile(json.dumps({"grammars": [{"json_schema": schema}]})))

    try:
        grammar = grammar_of(source, dialect, refusal)
        problem = _problem(grammars.compile(grammar.text))
        if problem and source.kind in ("json", "calls"):
            grammar = grammar_of(source, dialect, refusal, is_refused=True)
            problem = _problem(grammars.compile(grammar.text))
    except RecursionError:
        problem = "it is nested too deep"
    except ValueError as error:
        problem = str(error)
    return (
        CompileResult(problem=shortened(problem))
        if problem
        else CompileResult(grammar.text, "", _bounded(grammar.dropped))
    )


def _bounded(dropped: tuple[str, ...]) -> tuple[str, ...]:
    more = len(dropped) - MAX_DROPPED
    named = [shortened(each) for each in dropped[:MAX_DROPPED]]
    return (*named, *([f"and {more} more"] if more > 0 else ()))


def _problem(matcher: LLMatcher) -> str:
    """Return why no text can begin, "" if some can. Equals the check of `Follower`, which needs numpy."""
    if not matcher.is_error():
        if matcher.is_stopped():
            return "it has no text"
        if not any(matcher.compute_bitmask()) and not matcher.is_error():
            return "no token can follow"
    return reason(matcher) or TOO_MUCH if matcher.is_error() else ""


def _compile(grammars: Grammars, dialect: Dialect, packed: bytes, pipe: int) -> None:
    """Run a child until its end; a child ended by a limit leaves no reply."""
    try:
        os.close(0)
        os.close(1)
        limit_memory(MEMORY_BYTES)
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        signal.setitimer(signal.ITIMER_REAL, WALL_S)
        source = msgpack.decode(packed, type=GrammarSource)
        threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=lambda: _write(pipe, msgpack.encode(compiled(source, grammars, dialect))))
        thread.start()
        thread.join()
    finally:
        os._exit(0)


def _write(pipe: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(pipe, rest) :]


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the router is gone
        main()
