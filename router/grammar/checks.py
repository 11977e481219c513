"""Client of the process that compiles grammars: cache of results, and queue of waiting requests.

A grammar is a program sent by a client. So each is compiled in a process killed after a time limit, before any worker
sees the grammar. Results are cached, good or bad, so a repeated grammar costs nothing.
"""

import asyncio
import logging
from asyncio.subprocess import Process
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress

from msgspec import msgpack

from common.base.errors import RequestError
from common.wire.values.sampling_params import MAX_GRAMMAR_CHARS
from router.base.helper_frames import GRAMMAR
from router.base.helper_process import HelperProcess, stop_process
from router.grammar.source import CompileResult, GrammarSource

logger = logging.getLogger(__name__)

MAX_KNOWN = 1024
MAX_KNOWN_CHARS = 16 << 20
MAX_WAITING = 256
DEADLINE_S = 10.0
"""Seconds for a grammar behind others; compilation alone has `grammar_main.CPU_S`."""

NO_RESULT = CompileResult()


class GrammarChecks:
    """Cache and queue for `router.grammar.grammar_main`, which starts with the router and restarts at need."""

    def __init__(self, flags: Sequence[str]) -> None:
        self._helper = HelperProcess("router.grammar.grammar_main", flags)
        self._known: OrderedDict[GrammarSource, CompileResult] = OrderedDict()
        self._num_known_chars = 0
        self._waiting: dict[GrammarSource, asyncio.Future[CompileResult]] = {}
        self._asking: set[asyncio.Task[None]] = set()
        self._asked: dict[int, GrammarSource] = {}  # sent to the running process
        self._num_asked = 0
        self._listened_to: Process | None = None
        self._listener: asyncio.Task[None] | None = None

    async def compiled(self, source: GrammarSource) -> CompileResult:
        """Return the compiled grammar for workers; raises RequestError with the field if invalid or too large."""
        if not source.kind:
            return NO_RESULT
        found = self._known.get(source) or await self._find(source)
        if found == NO_RESULT:
            raise _busy()
        if source in self._known:
            self._known.move_to_end(source)
        if found.problem:
            raise RequestError(f"{source.field}: {found.problem}", param=source.field, code="invalid_grammar")
        return found

    async def warm_up(self) -> None:
        """Start the compiler process, and wait until it is ready or the deadline passes."""
        with suppress(RequestError):
            await self.compiled(GrammarSource("regex", "a"))

    async def close(self) -> None:
        tasks = [*self._asking, *([self._listener] if self._listener is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._helper.end()

    async def _find(self, source: GrammarSource) -> CompileResult:
        """Ask the process, once for all waiting requests with an equal grammar."""
        future = self._waiting.get(source)
        if future is None:
            if len(self._waiting) >= MAX_WAITING:
                message = f"{MAX_WAITING} grammars wait to be compiled; retry later"
                raise RequestError(message, code="grammar_queue_full", status=429, retry_after_s=1)
            future = self._waiting[source] = asyncio.get_running_loop().create_future()
            future.add_done_callback(lambda done: self._keep(source, done))
            asking = asyncio.create_task(self._ask(source))  # outlives a cancelled request: others may wait, too
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await asyncio.shield(future)
        except TimeoutError:
            future.cancel()
            raise _busy() from None
        except asyncio.CancelledError:
            if future.cancelled():
                raise _busy() from None
            raise

    async def _ask(self, source: GrammarSource) -> None:
        packed = msgpack.encode(source)
        try:
            process = await self._running()
            assert process.stdin is not None, "it was made with pipes"
            self._num_asked += 1
            self._asked[self._num_asked] = source
            process.stdin.write(GRAMMAR.pack(self._num_asked, len(packed)) + packed)
        except OSError as error:
            logger.error("the process for grammars cannot be asked: %r", error)
            if source in self._waiting:
                self._waiting[source].cancel()

    def _keep(self, source: GrammarSource, done: "asyncio.Future[CompileResult]") -> None:
        del self._waiting[source]
        if done.cancelled():
            return
        found = done.result()
        if found == NO_RESULT:
            return
        self._known[source] = found
        self._num_known_chars += _size(source, found)
        while len(self._known) > MAX_KNOWN or self._num_known_chars > MAX_KNOWN_CHARS:
            self._num_known_chars -= _size(*self._known.popitem(last=False))

    async def _running(self) -> Process:
        process = await self._helper.running()
        if process is not self._listened_to:
            self._listened_to, self._asked = process, {}
            self._listener = asyncio.create_task(self._listen(process, self._asked))
        return process

    async def _listen(self, process: Process, asked: dict[int, GrammarSource]) -> None:
        """Receive results until the process ends; then fail all unanswered grammars."""
        assert process.stdout is not None, "it was made with pipes"
        try:
            while True:
                number, num_bytes = GRAMMAR.unpack(await process.stdout.readexactly(GRAMMAR.size))
                found = msgpack.decode(await process.stdout.readexactly(num_bytes), type=CompileResult)
                if len(found.grammar) > MAX_GRAMMAR_CHARS:
                    found = CompileResult(
                        problem=f"it takes {len(found.grammar)} characters, at most {MAX_GRAMMAR_CHARS}"
                    )
                source = asked.pop(number, None)
                future = self._waiting.get(source) if source is not None else None
                if future is not None and not future.done():
                    future.set_result(found)
        except (OSError, EOFError):
            logger.error("the process for grammars ended, exit status %s", await stop_process(process))
            for source in asked.values():
                if source in self._waiting:
                    self._waiting[source].cancel()


def _size(source: GrammarSource, found: CompileResult) -> int:
    return sum(map(len, (source.text, source.whitespace, found.grammar, found.problem, *found.dropped)))


def _busy() -> RequestError:
    message = "the grammar could not be compiled now; retry later, and if that is in vain, the server's log says why"
    return RequestError(message, code="grammar_queue_full", status=503, retry_after_s=1)
