"""Reads bodies where it holds nobody up: the event loop, a thread, or another process, by their length.

Parsing JSON holds the interpreter lock, encoding does not. So short texts are encoded in threads, and a body that
takes long to parse goes to a process of its own, one at a time, whose memory is limited and given back.
"""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from common import options
from common.config import Config
from common.errors import RequestError
from router.bodies import NUM_FREE_BYTES
from router.openai_api import CompletionRequest
from router.reader_process import ReaderProcess
from router.reading import Kind, answer, parse_body, tokenized
from router.tokenizer import Tokenizer

MAX_INLINE = 512
"""Characters, or tokens to be shown as text: prompts this short together are done sooner than a thread wakes up."""
MAX_THREADS = 4


class Reader:
    """The way from a body to a request whose prompts are tokens."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="tokenizer")
        self._process = ReaderProcess(options.to_flags(config, ("model", "router", "log")))

    async def read(self, pieces: Sequence[bytes], max_model_len: int) -> CompletionRequest:
        """A body, given in pieces, checked and tokenized; raises RequestError."""
        if sum(map(len, pieces)) > NUM_FREE_BYTES:
            return await self._process.read(pieces, max_model_len)
        request = parse_body(b"".join(pieces), self._tokenizer.info)
        return await self._tokenized(request, max_model_len)

    async def answer(self, kind: Kind, pieces: Sequence[bytes], max_model_len: int) -> bytes:
        """The JSON that answers a body, given in pieces; raises RequestError."""
        if sum(map(len, pieces)) > NUM_FREE_BYTES:
            return await self._process.answer(kind, pieces, max_model_len)
        loop = asyncio.get_running_loop()
        data = b"".join(pieces)
        return await loop.run_in_executor(self._threads, answer, kind, data, self._tokenizer, max_model_len)

    async def warm_up(self) -> None:
        """Start the process that the first long body would wait for."""
        with contextlib.suppress(RequestError):
            await self._process.read([], 0)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._process.close()

    async def _tokenized(self, request: CompletionRequest, max_model_len: int) -> CompletionRequest:
        if sum(len(prompt) for prompt in request.prompts if request.text.echo or isinstance(prompt, str)) <= MAX_INLINE:
            return tokenized(request, self._tokenizer, max_model_len)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, tokenized, request, self._tokenizer, max_model_len)
