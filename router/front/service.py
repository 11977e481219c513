"""The service of a front's HTTP handlers: texts of this process, and completions of the dispatcher's."""

import json
import logging
from collections.abc import Iterator, Sequence
from typing import cast

from common.base.errors import ConfigError, RequestError
from common.base.version import VERSION
from common.settings.config import Config
from common.wire.messages.fronts import Page
from common.wire.transport.endpoints import FRONT_SOCKET, resolved
from common.wire.transport.sockets import check
from router.base.exposition import exposition
from router.base.shapes import Health, StatusName
from router.dispatch.completion.choice import Choice
from router.dispatch.room import admit
from router.front.counts import Counts
from router.front.link import DispatcherLink
from router.front.open_choice import OpenChoice
from router.http_service import HttpService

logger = logging.getLogger(__name__)

NO_DISPATCHER = "no_dispatcher"


class LinkOrder:
    """Choices handed to the dispatcher of another process."""

    def __init__(self, link: DispatcherLink, choices: Sequence[Choice]) -> None:
        self._link = link
        self._choices = [choice for choice in choices if not choice.is_over]
        self._open: list[OpenChoice] = []

    def prepare(self) -> Iterator[None]:
        return iter(())  # the dispatcher prepares

    def submit(self) -> None:
        self._open = self._link.submit(self._choices)

    def abort(self) -> None:
        self._link.abort(self._open)


class FrontService(HttpService):
    """Owns the connection to the dispatcher and its clock."""

    def __init__(self, config: Config) -> None:
        """Load the tokenizer; raises ConfigError without an endpoint, or with an endpoint that nobody may dial."""
        if not config.router.front_endpoint:
            raise ConfigError(
                "router.front_endpoint is empty: name the endpoint of a dispatcher, a router with the same option"
            )
        endpoint = resolved(config.router.front_endpoint, FRONT_SOCKET)
        check(config.net, endpoint)
        super().__init__(config)
        self.counts = Counts()
        self.link = DispatcherLink(config.router, config.net, endpoint, self.tokenizer.info, self.counts)
        self._is_draining = self._is_refusing = False

    @property
    def max_model_len(self) -> int:
        return (self.link.news.max_model_len if self.link.news else 0) or self.tokenizer.info.max_model_len

    @property
    def num_active(self) -> int:
        return len(self.link.open)

    @property
    def endpoint(self) -> str:
        return ""

    @property
    def status_name(self) -> StatusName:
        if self._is_draining:
            return "draining"
        return cast(StatusName, self.link.news.status) if self.link.has_session and self.link.news else "unavailable"

    def admit(self, num_completions: int = 1, num_tokens: int = 0) -> None:
        """Raise RequestError when the dispatcher would refuse, by its last news; without a session requests wait."""
        news = self.link.news
        if self._is_refusing or (news is not None and news.refuses):
            message = "the server is shutting down; retry with another one or later"
            raise RequestError(message, code="server_draining", status=503, retry_after_s=5)
        limits = self.config.router
        num_active, num_queued = self.num_active, 0
        max_requests, max_tokens = limits.max_requests, limits.max_queued_tokens
        if news is not None:
            num_active, num_queued = max(num_active, news.num_active), news.num_queued_tokens
            max_requests, max_tokens = news.max_requests, news.max_queued_tokens
        admit(num_completions, num_tokens, num_active, num_queued, max_requests, max_tokens)

    def order(self, choices: Sequence[Choice]) -> LinkOrder:
        return LinkOrder(self.link, choices)

    def count_refusal(self, error: RequestError) -> None:
        self.counts.count_refusal(error)

    async def health(self) -> Health:
        """Return the dispatcher's report; without an answer say so."""
        try:
            return cast(Health, json.loads(await self.link.page(Page.HEALTH)))
        except TimeoutError:
            return {
                "version": VERSION,
                "status": "unavailable",
                "problems": [f"no answer of the dispatcher at {self.link.endpoint}: {self.link.problem}"],
                "workers": {},
                "kv_paths": [],
                "memory_servers": [],
                "role_changes": [],
            }

    async def exposition(self) -> bytes:
        """Return the front's own families; the dispatcher's are at the dispatcher."""
        link = self.link
        return await exposition(
            self.counts.families(len(link.open), self.unread.num_bytes, has_session=link.has_session)
        )

    async def status_body(self) -> bytes:
        try:
            return await self.link.page(Page.STATUS)
        except TimeoutError:
            message = f"no answer of the dispatcher at {self.link.endpoint}: {self.link.problem}"
            raise RequestError(message, code=NO_DISPATCHER, status=503, retry_after_s=1) from None

    def connect(self) -> None:
        self.link.start()
        logger.info("front %s of the dispatcher at %s", self.link.front_id, self.link.endpoint)

    def begin_drain(self, *, refuses: bool) -> None:
        self._is_draining, self._is_refusing = True, refuses

    def fail_all(self, error: RequestError) -> None:
        self.link.fail(list(self.link.open.values()), error)

    def disconnect(self) -> None:
        self.link.close()

    def tick(self) -> None:
        self.link.tick()
