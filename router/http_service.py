"""Everything that HTTP handlers use: texts of this process, and completions of this process or of a dispatcher's.

`router.service` has the dispatcher in the process. A front (`router.front`) reaches the dispatcher over a socket.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

from common.base.errors import RequestError
from common.settings import options
from common.settings.config import Config
from router.base.shapes import Health, StatusName
from router.dispatch.completion.choice import Choice
from router.grammar.checks import GrammarChecks
from router.http.unread_answers import Unread
from router.reading.bodies import Bodies
from router.reading.reader import Reader
from router.text.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05


class Order(Protocol):
    """The choices of an HTTP request that are not over yet, handed to a dispatcher."""

    def prepare(self) -> Iterator[None]:
        """Prepare before submission; yield between pieces of work, so that other tasks get a turn."""
        ...

    def submit(self) -> None:
        """Submit all choices or none; raises RequestError when there is no room."""
        ...

    def abort(self) -> None:
        """End choices after the client left; no-op for choices that are over."""
        ...


class HttpService(ABC):
    """Owns what reads requests and writes texts; subclasses add the way to a dispatcher."""

    def __init__(self, config: Config) -> None:
        """Load the tokenizer; raises ConfigError with the remedy."""
        self.config = config
        self.started_s = int(time.time())  # wall clock
        self.tokenizer = load_tokenizer(config.model, config.router.text_cache_bytes)
        self.bodies = Bodies(config.router)
        self.unread = Unread(config.router.max_unread_bytes)
        self.reader = Reader(config, self.tokenizer)
        self.grammars = GrammarChecks(options.to_flags(config, ("model", "router", "log")))
        self._clockwork: asyncio.Task[None] | None = None

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Most tokens, prompt plus outputs, that every worker can take."""

    @property
    @abstractmethod
    def num_active(self) -> int:
        """Completions of this process's HTTP requests, queued or at workers."""

    @property
    @abstractmethod
    def status_name(self) -> StatusName:
        """State of the whole system, as far as this process knows."""

    @abstractmethod
    def admit(self, num_completions: int = 1, num_tokens: int = 0) -> None:
        """Raise RequestError when an HTTP request with `num_completions` could not be submitted now."""

    @abstractmethod
    def order(self, choices: Sequence[Choice]) -> Order:
        """Make the order of an HTTP request's choices."""

    @abstractmethod
    def count_refusal(self, error: RequestError) -> None:
        """Count an HTTP request answered with an error."""

    @abstractmethod
    async def health(self) -> Health:
        """Return the body of GET /health."""

    @abstractmethod
    async def exposition(self) -> bytes:
        """Return metrics in Prometheus' text format."""

    @abstractmethod
    async def status_body(self) -> bytes:
        """Return the data of the status page, as JSON."""

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """Endpoint that workers and operators dial; empty if nobody dials this process."""

    @abstractmethod
    def fail_all(self, error: RequestError) -> None:
        """End everything, because the time to drain is over."""

    @abstractmethod
    def connect(self) -> None:
        """Begin to send and receive messages."""

    @abstractmethod
    def disconnect(self) -> None:
        """Close the sockets."""

    @abstractmethod
    def tick(self) -> None:
        """Do the periodic work, twice a heartbeat."""

    @abstractmethod
    def begin_drain(self, *, refuses: bool) -> None:
        """Tell everyone that this process is draining, and refuse new completions if `refuses`."""

    def start(self) -> None:
        """Begin to work; call on the event loop."""
        self.connect()
        self._clockwork = asyncio.create_task(self._tick_forever())

    async def drain(self, timeout_s: float, *, refuses: bool = True) -> bool:
        """Wait for running completions, and refuse new ones if `refuses`; return False after a timeout."""
        self.begin_drain(refuses=refuses)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while self.num_active and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(DRAIN_POLL_S)
        return self.num_active == 0

    async def close(self) -> None:
        if self._clockwork is not None:
            self._clockwork.cancel()
            await asyncio.gather(self._clockwork, return_exceptions=True)
        self.disconnect()
        await asyncio.gather(self.reader.close(), self.grammars.close())

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.net.heartbeat_s / 2)
            try:
                self.tick()
            except Exception:  # without periodic work no deadline would hold any more
                logger.exception("a bug in the clockwork; going on")
