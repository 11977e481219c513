"""The router without HTTP handlers: all parts with the lifetime of the process, put together and kept going."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from common.base.errors import RequestError
from common.settings.config import Config
from common.wire.messages.frames import MAX_FRAME_BYTES
from common.wire.messages.fronts import Page
from common.wire.messages.memory_reports import KVEvents, MemoryHeartbeat, MemoryReady, WorkerEnded
from common.wire.messages.operator import DrainWanted, LoadWanted, RoleChange
from common.wire.messages.worker import (
    Heartbeat,
    InquiryReply,
    KVPathReport,
    LogprobBatch,
    Message,
    PromptCached,
    PromptLogprobs,
    RequestFailed,
    TokenBatch,
    WorkerGone,
    WorkerLeaving,
    WorkerReady,
)
from common.wire.transport.endpoints import FRONT_SOCKET, ROUTER_SOCKET, resolved
from router.base.exposition import exposition
from router.base.shapes import Health, StatusName
from router.dispatch.completion.choice import Choice
from router.dispatch.completion.journey import Journey
from router.dispatch.completion.state import Completion, CompletionTimes
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.incidents import Incidents
from router.dispatch.inquiries import Inquiries
from router.dispatch.metrics import Metrics
from router.dispatch.worker_reports import WorkerReports
from router.http_service import HttpService
from router.observe import health
from router.observe.fleet_metrics import FleetMetrics
from router.observe.status_report import StatusReporter
from router.placement.capacity import max_model_len
from router.placement.worker_pool import WorkerPool
from router.sessions.fronts import Fronts
from router.workers.hub import AsyncHub, Handler, Handlers, Links, Undelivered
from router.workers.kv_events import KVEventReader
from router.workers.membership import Membership
from router.workers.memory_servers import MemoryServers
from router.workers.operators import Operators
from router.workers.role_changes import RoleChanges

logger = logging.getLogger(__name__)


class LocalOrder:
    """Choices handed to the dispatcher of this process."""

    def __init__(self, dispatcher: Dispatcher, choices: Sequence[Choice]) -> None:
        self._dispatcher = dispatcher
        self._completions = [_completion(choice) for choice in choices if not choice.is_over]

    def prepare(self) -> Iterator[None]:
        return self._dispatcher.prepare(self._completions)

    def submit(self) -> None:
        self._dispatcher.submit(self._completions)

    def abort(self) -> None:
        self._dispatcher.abort(*self._completions)


class Service(HttpService):
    """Owns the sockets and the periodic work; the HTTP handlers use its parts."""

    def __init__(self, config: Config) -> None:
        """Load the tokenizer and bind the endpoint; raises ConfigError with the remedy."""
        super().__init__(config)
        self.hub = AsyncHub(config.net, resolved(config.net.router_endpoint, ROUTER_SOCKET))
        incidents = Incidents()
        self.metrics = Metrics(incidents)
        self.pool = WorkerPool(config.net, config.router.prefill_window)
        self.dispatcher = Dispatcher(
            config.router, config.net, self.pool, self._send, self.metrics,
            defer=lambda act: asyncio.get_running_loop().call_soon(act),
        )  # fmt: skip
        epoch = secrets.randbits(62)
        links = Links(config.net, epoch, self.hub.send, incidents=incidents)
        self._membership = Membership(links, self.tokenizer.info, self.pool, self.dispatcher)
        self.memory_servers = MemoryServers(links)
        self.role_changes = RoleChanges(incidents)
        self._operators = Operators(self.pool, self.memory_servers, self.dispatcher, self.hub.send)
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
        self.front_hub: AsyncHub | None = None
        self.fronts: Fronts | None = None
        if config.router.front_endpoint:
            endpoint = resolved(config.router.front_endpoint, FRONT_SOCKET)
            self.front_hub = AsyncHub(config.net, endpoint, MAX_FRAME_BYTES)
            parts = config.router, config.net, self.tokenizer.info, self.dispatcher
            self.fronts = Fronts(*parts, self.front_hub.send, self)
        lifecycle, scheduler = self.dispatcher.lifecycle, self.dispatcher.scheduler
        self._inquiries = Inquiries(config.net, self._send, lifecycle.active.get)
        self._reports = WorkerReports(lifecycle, scheduler, self.pool, self._send, self.tokenizer.info.vocab_size)

    @property
    def max_model_len(self) -> int:
        return max_model_len(self.pool, self.tokenizer.info.max_model_len)

    @property
    def num_active(self) -> int:
        return self.dispatcher.num_active

    @property
    def endpoint(self) -> str:
        return self.hub.endpoint

    @property
    def status_name(self) -> StatusName:
        return self.pool.readiness.status

    def admit(self, num_completions: int = 1, num_tokens: int = 0) -> None:
        self.dispatcher.admit(num_completions, num_tokens)

    def order(self, choices: Sequence[Choice]) -> LocalOrder:
        return LocalOrder(self.dispatcher, choices)

    def count_refusal(self, error: RequestError) -> None:
        self.metrics.count_refusal(error)

    async def health(self) -> Health:
        parts = self.pool, self.memory_servers, self.role_changes
        return health.report(*parts, draining=self.dispatcher.draining, now_s=time.monotonic())

    async def exposition(self) -> bytes:
        return await exposition(self.metrics.families())

    async def status_body(self) -> bytes:
        return self.status.body()

    async def page(self, page: Page) -> bytes:
        """Return what a front passes on."""
        match page:
            case Page.HEALTH:
                return json.dumps(await self.health()).encode()
            case Page.STATUS:
                return await self.status_body()

    def connect(self) -> None:
        self.hub.start(self.handlers(), self._on_unreachable)
        if self.front_hub is not None and self.fronts is not None:
            self.front_hub.start(self.fronts.handlers(), self.fronts.on_unreachable)
            logger.info("fronts dial %s", self.front_hub.endpoint)
        info = self.tokenizer.info
        logger.info("model %s (%s), up to %d tokens; workers dial %s",
                    info.name, info.model_fingerprint, info.max_model_len, self.hub.endpoint)  # fmt: skip
        if not self.tokenizer.cuts_texts:
            logger.info("it is not known where this tokenizer's texts may be cut: each is encoded from its beginning")

    def begin_drain(self, *, refuses: bool) -> None:
        self.dispatcher.draining, self.dispatcher.refusing = True, refuses

    def fail_all(self, error: RequestError) -> None:
        if self.fronts is not None:
            self.fronts.close()  # fronts keep their completions for the next dispatcher
        self.dispatcher.fail_all(error)

    def disconnect(self) -> None:
        self._membership.release_all()
        if self.front_hub is not None and self.fronts is not None:
            self.fronts.close()
            self.front_hub.close()
        self.hub.close()

    def _send(self, worker_id: str, message: Message) -> None:
        worker = self.pool.find(worker_id)
        if worker is not None:
            self.hub.send(worker.connection, message)

    def tick(self) -> None:
        self._membership.check()
        self.memory_servers.check()
        self._kv_events.check()
        self._inquiries.ask(self.dispatcher.active)
        self.dispatcher.tick()
        if self.fronts is not None:
            self.fronts.check()
        self.status.history.tick()

    def _on_unreachable(self, undelivered: Undelivered) -> None:
        self._membership.on_unreachable(undelivered)
        self.memory_servers.on_unreachable(undelivered)
        self._kv_events.check()

    def handlers(self) -> Handlers:
        """Return the handler of each message type that a router receives."""
        reports, membership, servers, operators = self._reports, self._membership, self.memory_servers, self._operators
        return {
            TokenBatch: reports.on_tokens,
            LogprobBatch: reports.on_tokens,
            PromptLogprobs: reports.on_prompt_logprobs,
            PromptCached: reports.on_cached,
            RequestFailed: reports.on_failed,
            InquiryReply: self._inquiries.on_reply,
            WorkerReady: self._then_check(membership.on_ready),
            Heartbeat: membership.on_heartbeat,
            WorkerLeaving: membership.on_leaving,
            WorkerGone: membership.on_worker_gone,
            KVPathReport: membership.on_path,
            WorkerEnded: self._on_worker_ended,
            MemoryReady: self._then_check(servers.on_ready),
            MemoryHeartbeat: servers.on_heartbeat,
            KVEvents: self._kv_events.on_events,
            DrainWanted: operators.on_drain_wanted,
            LoadWanted: operators.on_load_wanted,
            RoleChange: self.role_changes.on_change,
        }

    def _then_check(self, handler: Handler) -> Handler:
        """Return a handler that also requests block events, because a pool may be new."""

        def handle(identity: bytes, message: Any) -> None:
            handler(identity, message)
            self._kv_events.check()

        return handle

    def _on_worker_ended(self, identity: bytes, report: WorkerEnded) -> None:
        if not self._membership.on_worker_ended(report):
            self.hub.refuse(identity, report, "not of the memory server that this worker named")


def _completion(choice: Choice) -> Completion:
    journey = Journey(choice.watcher) if choice.watcher is not None else None
    return Completion(choice.spec, choice.output, choice, CompletionTimes(choice.received_s), journey=journey)
