"""The router without HTTP: all parts with the lifetime of the process, put together and kept going."""

import asyncio
import logging
import secrets
import time
from typing import assert_never

from common.settings import options
from common.settings.config import Config
from common.wire.messages.handoff import DecodeRequest, KVPathResult, KVPoolExport, KVProgress
from common.wire.messages.memory import MemoryMessage
from common.wire.messages.memory_reports import KVEvents, MemoryHeartbeat, MemoryReady, MemoryReport, WorkerEnded
from common.wire.messages.operator import DrainAnswer, DrainWanted, Leave, LoadReport, LoadWanted, RoleChange
from common.wire.messages.worker import (
    Abort,
    DecodePeer,
    Heartbeat,
    Inquiry,
    InquiryReply,
    Knock,
    KVEventsWanted,
    KVPathReport,
    Message,
    PeerGone,
    PrefillRequest,
    PromptCached,
    PromptLogprobs,
    Refused,
    RequestFailed,
    Reregister,
    StillBound,
    TokenBatch,
    Welcome,
    WorkerGone,
    WorkerLeaving,
    WorkerMessage,
    WorkerReady,
)
from common.wire.messages.worker_id import is_from
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.incidents import Incidents
from router.dispatch.inquiries import Inquiries
from router.dispatch.metrics import Metrics
from router.grammar.checks import GrammarChecks
from router.http.unread_answers import Unread
from router.observe.fleet_metrics import FleetMetrics
from router.observe.status_report import StatusReporter
from router.placement.capacity import max_model_len
from router.placement.worker_pool import WorkerPool
from router.reading.bodies import Bodies
from router.reading.reader import Reader
from router.text.tokenizer import load_tokenizer
from router.workers.hub import AsyncHub, Undelivered
from router.workers.kv_events import KVEventReader
from router.workers.links import Links
from router.workers.membership import Membership
from router.workers.memory_servers import MemoryServers
from router.workers.operators import Operators
from router.workers.role_changes import RoleChanges

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05


class Service:
    """Owns the sockets and the periodic work; the HTTP handlers use its parts."""

    def __init__(self, config: Config) -> None:
        """Load the tokenizer and bind the endpoint; raises ConfigError with the remedy."""
        self.config = config
        self.started_s = int(time.time())  # wall clock
        self.tokenizer = load_tokenizer(config.model, config.router.text_cache_bytes)
        self.bodies = Bodies(config.router)
        self.unread = Unread(config.router.max_unread_bytes)
        self.reader = Reader(config, self.tokenizer)
        self.grammars = GrammarChecks(options.to_flags(config, ("model", "router", "log")))
        self.hub = AsyncHub(config.net)
        incidents = Incidents()
        self.metrics = Metrics(incidents)
        self.pool = WorkerPool(config.net, config.router.prefill_window)
        self.dispatcher = Dispatcher(
            config.router, config.net, self.tokenizer.info.vocab_size, self.pool, self._send, self.metrics,
            defer=lambda act: asyncio.get_running_loop().call_soon(act),
        )  # fmt: skip
        links = Links(config.net, secrets.randbits(62), self.hub.send, incidents=incidents)
        self._membership = Membership(links, self.tokenizer.info, self.pool, self.dispatcher)
        self.memory_servers = MemoryServers(links)
        self.role_changes = RoleChanges(incidents)
        self._operators = Operators(
            self.pool, self.memory_servers, self.dispatcher, self.role_changes, self.hub.send
        )  # fmt: skip
        self._kv_events = KVEventReader(
            config.net, self.pool, self.memory_servers, self.hub.send, is_on=config.router.kv_events
        )
        self.metrics.describe(self.tokenizer.info)
        self.metrics.registry.register(
            FleetMetrics(
                self.pool, self.memory_servers, self.role_changes, self.dispatcher.queue_sizes,
                lambda: self.hub.num_dropped, lambda: self.dispatcher.draining,
            )
        )  # fmt: skip
        self.metrics.registry.register(self.unread)
        self.metrics.observe_texts(lambda: self.reader.text_counts)
        self.status = StatusReporter(
            self.tokenizer.info, self.pool, self.memory_servers, self.dispatcher, self.metrics,
            has_chats=self.tokenizer.chat_template is not None,
        )  # fmt: skip
        self._inquiries = Inquiries(config.net, self._send, self.dispatcher.find)
        self._clockwork: asyncio.Task[None] | None = None

    @property
    def max_model_len(self) -> int:
        """Most tokens, prompt plus outputs, that every worker can take."""
        return max_model_len(self.pool, self.tokenizer.info.max_model_len)

    def start(self) -> None:
        """Begin to serve workers; call on the event loop."""
        self.hub.start(self._receive, self._on_unreachable)
        self._clockwork = asyncio.create_task(self._tick_forever())
        info = self.tokenizer.info
        logger.info("model %s (%s), up to %d tokens; workers dial %s",
                    info.name, info.model_fingerprint, info.max_model_len, self.hub.endpoint)  # fmt: skip
        if not self.tokenizer.cuts_texts:
            logger.info("it is not known where this tokenizer's texts may be cut: each is encoded from its beginning")

    async def drain(self, timeout_s: float, *, refuses: bool = True) -> bool:
        """Wait for running completions, and refuse new ones if `refuses`; return False after a timeout."""
        self.dispatcher.draining, self.dispatcher.refusing = True, refuses
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while self.dispatcher.num_active and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(DRAIN_POLL_S)
        return self.dispatcher.num_active == 0

    async def close(self) -> None:
        if self._clockwork is not None:
            self._clockwork.cancel()
            await asyncio.gather(self._clockwork, return_exceptions=True)
        self._membership.dismiss_all()
        self.hub.close()
        await asyncio.gather(self.reader.close(), self.grammars.close())

    def _send(self, worker_id: str, message: Message) -> None:
        worker = self.pool.find(worker_id)
        if worker is not None:
            self.hub.send(worker.connection, message)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.net.heartbeat_s / 2)
            try:
                self._membership.check()
                self.memory_servers.check()
                self._kv_events.check()
                self._inquiries.ask(self.dispatcher.active)
                self.dispatcher.tick()
                self.status.history.tick()
            except Exception:  # without periodic work no deadline would hold any more
                logger.exception("a bug in the clockwork; going on")

    def _on_unreachable(self, undelivered: Undelivered) -> None:
        self._membership.on_unreachable(undelivered)
        self.memory_servers.on_unreachable(undelivered)
        self._kv_events.check()

    def _receive(self, identity: bytes, message: Message) -> None:
        if is_from(identity, message):
            self._handle(identity, message)
        else:
            self.hub.refuse(identity, message, "not in the name of whose connection it is")

    def _handle(self, identity: bytes, message: Message) -> None:
        if isinstance(message, MemoryReport):
            self._heed_memory_server(identity, message)
        elif isinstance(message, DrainWanted | LoadWanted | RoleChange):
            self._operators.handle(identity, message)
        elif isinstance(message, DrainAnswer | Leave | LoadReport):
            self.hub.refuse(identity, message, "only a router sends it")
        elif isinstance(message, MemoryMessage):
            self.hub.refuse(identity, message, "only workers and their memory servers receive it")
        else:
            self._heed_worker(identity, message)

    def _heed_worker(self, identity: bytes, message: WorkerMessage) -> None:
        match message:
            case TokenBatch() | PromptLogprobs() | PromptCached() | RequestFailed():
                self._heed_of_completions(message)
            case Heartbeat():
                self._membership.on_heartbeat(identity, message)
            case InquiryReply():
                self._inquiries.on_reply(message)
            case WorkerReady():
                self._membership.on_ready(identity, message)
                self._kv_events.check()
            case WorkerGone():
                self._membership.on_worker_gone(message)
            case WorkerLeaving():
                self._membership.on_leaving(message)
            case KVPathReport():
                self._membership.on_path(message)
            case (
                Welcome() | Refused() | Reregister() | DecodePeer() | PeerGone() | PrefillRequest() | DecodeRequest()
                | Abort() | Inquiry() | StillBound() | Knock() | KVEventsWanted()
                | KVPoolExport() | KVProgress() | KVPathResult()
            ):  # fmt: skip
                self.hub.refuse(identity, message, "only workers receive it")
            case _:
                assert_never(message)

    def _heed_of_completions(self, message: TokenBatch | PromptLogprobs | PromptCached | RequestFailed) -> None:
        """Pass a worker's report to the dispatcher; raises ValueError for malformed columns."""
        match message:
            case TokenBatch():
                self.dispatcher.on_tokens(message)
            case PromptLogprobs():
                self.dispatcher.on_prompt_logprobs(message)
            case PromptCached():
                self.dispatcher.on_cached(message)
            case RequestFailed():
                self.dispatcher.on_failed(message)

    def _heed_memory_server(self, identity: bytes, report: MemoryReport) -> None:
        match report:
            case MemoryHeartbeat():
                self.memory_servers.on_heartbeat(identity, report)
            case KVEvents():
                self._kv_events.on_events(report)
            case MemoryReady():
                self.memory_servers.on_ready(identity, report)
                self._kv_events.check()
            case WorkerEnded():
                if not self._membership.on_worker_ended(report):
                    self.hub.refuse(identity, report, "not of the memory server that this worker named")
