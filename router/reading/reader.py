"""Reading of bodies without holding up the event loop: inline, in a thread, or in another process, by length.

Parsing JSON holds the interpreter lock, but encoding does not. So short texts are encoded in threads. A long body goes
to a process with limited memory, which reads a single body at a time. The prompt of a short chat is written in another
process, because a template may take too long, and encoded here as text.
"""

import asyncio
import os
from functools import partial

from common.base.errors import RequestError
from common.settings import options
from common.settings.config import Config
from router.base.helper_frames import CONVERSATIONS, MODEL, Kind
from router.base.helper_process import HelperProcess
from router.reading.batches import Batches
from router.reading.bodies import NUM_FREE_BYTES
from router.reading.json_body import values_of
from router.reading.reader_process import ReaderProcess
from router.reading.reading import MAX_IDS_BYTES, answer, parse_body, parse_ids, tokenized
from router.requests.chat_api import template_of
from router.requests.completion_api import CompletionRequest
from router.requests.token_api import is_chat
from router.text.chat_model import packed_model
from router.text.text_cache import TextCounts
from router.text.tokenizer import Tokenizer

MAX_INLINE = 512
"""Characters or echoed tokens in all; shorter prompts are done before a thread wakes up."""
MAX_THREADS = 4
MAX_WRITTEN_CHARS = 2 * NUM_FREE_BYTES
"""Limit for the written prompt of a short chat."""
SHORT_DEADLINE_S = 10.0
"""Far above a short chat's time; afterwards the process is restarted."""


class Reader:
    """Maker of tokenized requests from bodies."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = Batches(min(MAX_THREADS, os.cpu_count() or 1))
        flags = options.to_flags(config, ("model", "router", "log"))
        self._process = ReaderProcess(HelperProcess("router.reading.reader_main", flags))
        self._chat_process = ReaderProcess(self._template_process(config), SHORT_DEADLINE_S)

    async def read(self, pieces: list[bytes], max_model_len: int, kind: Kind = Kind.COMPLETION) -> CompletionRequest:
        """Check and tokenize a body given in pieces, which may be cleared; raise RequestError."""
        if kind in CONVERSATIONS:
            template_of(self._tokenizer)  # raise early: without a template, no process is needed
        num_bytes = sum(map(len, pieces))
        if num_bytes > NUM_FREE_BYTES:
            may_be_ids = kind is Kind.COMPLETION and num_bytes <= MAX_IDS_BYTES
            request = parse_ids(b"".join(pieces), self._tokenizer.info) if may_be_ids else None
            if request is None:
                return await self._process.read(pieces, max_model_len, kind)
        elif kind in CONVERSATIONS:
            request = await self._chat_process.read([*pieces], max_model_len, kind)
            is_long = sum(map(len, request.prompts)) > MAX_WRITTEN_CHARS
            if is_long or request.encoding.mark:  # a thread must not encode a mark while others encode
                return await self._process.read(pieces, max_model_len, kind)
        else:
            request = parse_body(b"".join(pieces), self._tokenizer.info)
        return await self._tokenized(request, max_model_len)

    async def answer(self, kind: Kind, pieces: list[bytes], max_model_len: int) -> bytes:
        """Return the JSON answer to a body of /tokenize or /detokenize; raise RequestError."""
        if sum(map(len, pieces)) > NUM_FREE_BYTES:
            return await self._process.answer(kind, pieces, max_model_len)
        data = b"".join(pieces)
        if kind is Kind.TOKENIZE and is_chat(values_of(data)):
            template_of(self._tokenizer)
            return await self._process.answer(kind, [data], max_model_len)
        work = partial(answer, kind, data, self._tokenizer, max_model_len)
        return await self._threads.run(work, num_chars=len(data))

    @property
    def text_counts(self) -> TextCounts:
        """Counts of all texts encoded here or in the process."""
        return self._tokenizer.text_counts + self._process.text_counts

    async def warm_up(self) -> None:
        """Start both processes, so the first long body and the first chat need not wait."""
        chat = self.read([b'{"messages": [{"role": "user", "content": "a"}]}'], 1, Kind.CHAT)
        for error in await asyncio.gather(self._process.read([], 0), chat, return_exceptions=True):
            if isinstance(error, BaseException) and not isinstance(error, RequestError):
                raise error

    async def close(self) -> None:
        self._threads.close()
        await asyncio.gather(self._process.close(), self._chat_process.close())

    def _template_process(self, config: Config) -> HelperProcess:
        """Return the process for templates; without a chat template, the process is never started."""
        packed = packed_model(self._tokenizer) if self._tokenizer.chat_template is not None else b""
        flags = options.to_flags(config, ("log",))
        return HelperProcess("router.reading.template_main", flags, MODEL.pack(len(packed)) + packed)

    async def _tokenized(self, request: CompletionRequest, max_model_len: int) -> CompletionRequest:
        lengths = (len(prompt) for prompt in request.prompts if request.text.echo or isinstance(prompt, str))
        num_chars = sum(lengths) + sum(map(len, request.bad_words))
        if num_chars <= MAX_INLINE:
            return tokenized(request, self._tokenizer, max_model_len)
        return await self._threads.run(partial(tokenized, request, self._tokenizer, max_model_len), num_chars)
