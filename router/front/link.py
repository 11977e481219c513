"""A front's way to its dispatcher: sessions, open choices, and what the dispatcher tells.

A session ends with a lost message, a silence, or the dispatcher. The next session gets all open choices with their
outputs so far, so texts go on. Choices without a session for `router.worker_wait_s` fail.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from common.base.errors import RequestError
from common.base.version import VERSION
from common.settings.config import NetSection, RouterSection
from common.wire.messages.fronts import (
    FrontAsk,
    FrontBeat,
    FrontDone,
    FrontFailed,
    FrontHello,
    FrontNews,
    FrontPage,
    FrontPrompt,
    FrontScores,
    FrontTokens,
    FrontVoid,
    FrontWelcome,
    Page,
)
from common.wire.messages.worker import Message, PromptLogprobs, Refused
from common.wire.messages.worker_id import connection_of, make_epoch, make_id
from common.wire.values.output_token import OutputToken, plain_token
from common.wire.values.packing import pack_ids, unpack_ids
from router.dispatch.completion.choice import Choice
from router.front.counts import Counts
from router.front.open_choice import REASONS, OpenChoice, order_of, scored
from router.front.spoke import AsyncSpoke
from router.text.model_info import ModelInfo

logger = logging.getLogger(__name__)

MAX_TICKET = 1 << 31
COMPLAINT_INTERVAL_S = 60.0
"""Seconds between two log lines that say the same of a missing session."""
ASKED = f"is a router of this version, {VERSION}, there, with the same router.front_endpoint and net.secret_file?"
NUMBERED = (FrontTokens, FrontScores, FrontFailed)


class DispatcherLink:
    """The connection to a dispatcher; `open` is every choice handed in and not over.

    Args:
        endpoint: of the dispatcher, resolved.
    """

    def __init__(
        self,
        limits: RouterSection,
        net: NetSection,
        endpoint: str,
        info: ModelInfo,
        counts: Counts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.front_id = f"{make_id('front', '')}-{secrets.token_hex(3)}"
        self.endpoint, self.open = endpoint, dict[int, OpenChoice]()
        self.news: FrontNews | None = None  # of the present session
        self.problem = "no dispatcher has answered yet"
        self._limits, self._net, self._info, self._counts, self._clock = limits, net, info, counts, clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._spoke: AsyncSpoke | None = None
        self._epoch = self._num_sent = self._num_received = self._next_ticket = 0
        self._is_welcome = False
        self._heard_s = self._lost_s = self._ticked_s = self._complained_s = clock()
        self._refusal = self._complaint = ""  # of this session; the last one in the log
        self._pages: dict[Page, asyncio.Future[bytes]] = {}
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            FrontTokens: self._on_tokens,
            FrontNews: self._on_news,
            FrontScores: self._on_scores,
            FrontFailed: self._on_failed,
            FrontPage: self._on_page,
            FrontWelcome: self._on_welcome,
            FrontVoid: self._on_void,
        }

    @property
    def has_session(self) -> bool:
        return self._is_welcome and self.news is not None

    def start(self) -> None:
        """Begin the first session; call on the event loop."""
        self._begin()

    def close(self) -> None:
        """End the session; open choices are aborted by the dispatcher, once it sees the connection gone."""
        if self._spoke is not None:
            self._done([(each.ticket, False) for each in self.open.values() if each.is_sent])
            self._spoke.close()
            self._spoke = None
        self._context.destroy(linger=200)

    def submit(self, choices: Sequence[Choice]) -> list[OpenChoice]:
        """Hand in the choices of an HTTP request, at once or in the next session."""
        now_s = self._clock()
        made = []
        for choice in choices:
            self._next_ticket = (self._next_ticket + 1) % MAX_TICKET
            made.append(OpenChoice(self._next_ticket, choice, now_s))
            self.open[self._next_ticket] = made[-1]
        if made and self._is_welcome:
            self._send_order(made)
        return made

    def abort(self, choices: Sequence[OpenChoice]) -> None:
        """Give up choices, because the client left; no-op for choices that are over."""
        left = [each for each in choices if self.open.pop(each.ticket, None) is not None]
        for each in left:
            each.end(self._clock(), "aborted")
        self._done([(each.ticket, False) for each in left if each.is_sent])

    def fail(self, choices: Sequence[OpenChoice], error: RequestError) -> None:
        """End choices with an error."""
        left = [each for each in choices if self.open.pop(each.ticket, None) is not None]
        for each in left:
            each.choice.fail(error)
            each.end(self._clock(), error.code)
        self._done([(each.ticket, False) for each in left if each.is_sent])

    async def page(self, page: Page) -> bytes:
        """Return a page of the dispatcher; raise TimeoutError without an answer in time."""
        if not self.has_session or self._spoke is None:
            raise TimeoutError
        future = self._pages.get(page)
        if future is None:
            future = self._pages[page] = asyncio.get_running_loop().create_future()
            self._spoke.send(FrontAsk(self.front_id, self._epoch, page))
        try:
            async with asyncio.timeout(self._net.worker_timeout_s):
                return await asyncio.shield(future)
        except TimeoutError:
            self._pages.pop(page, None)
            raise

    def tick(self) -> None:
        """Send a sign of life, replace a silent session, and fail what waits too long; call a few times a second."""
        now_s = self._clock()
        asleep_s, self._ticked_s = now_s - self._ticked_s, now_s
        if asleep_s > self._net.worker_timeout_s / 2:
            self._heard_s = now_s  # this process stood still, and the dispatcher may have spoken
        if now_s - self._heard_s > self._net.worker_timeout_s:
            silent = f"the dispatcher at {self.endpoint} is silent for {now_s - self._heard_s:.1f} s"
            self._lose(self._refusal or silent)
        elif self._is_welcome and self._spoke is not None:
            self._spoke.send(FrontBeat(self.front_id, self._epoch, self._num_sent))
        if not self._is_welcome:
            self._fail_unserved(now_s)

    def _fail_unserved(self, now_s: float) -> None:
        wait_s = self._limits.worker_wait_s
        late = [each for each in self.open.values() if now_s - max(each.submitted_s, self._lost_s) >= wait_s]
        if late:
            message = f"no dispatcher for {wait_s:g} s (router.worker_wait_s): {self.problem}"
            self.fail(late, RequestError(message, code="no_dispatcher", status=503, retry_after_s=5))

    # --- sessions -------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Dial under a new name, so that no message of an earlier session arrives."""
        self._epoch, self._num_sent, self._num_received = make_epoch(), 0, 0
        self._is_welcome, self.news, self._heard_s, self._refusal = False, None, self._clock(), ""
        self._pages.clear()  # whoever asked gets no answer in time
        for each in self.open.values():
            each.is_sent = False
        identity = connection_of(self.front_id, self._epoch)
        self._spoke = AsyncSpoke(self._context, self._net, self.endpoint, identity, self._on_message)
        info = self._info
        self._spoke.send(
            FrontHello(
                self.front_id, self._epoch, os.getpid(), VERSION, info.name, info.model_fingerprint,
                info.tokenizer_fingerprint, f"{self._limits.host}:{self._limits.port}",
            )
        )  # fmt: skip

    def _lose(self, reason: str) -> None:
        """End the session, and begin the next."""
        if self._is_welcome:
            logger.warning("session lost: %s; open choices: %d", reason, len(self.open))
            self._lost_s = self._clock()
            self._counts.num_lost += 1
        elif not self._refusal:
            self._complain(f"no answer yet from a dispatcher at {self.endpoint}; {ASKED}")
        self.problem = reason
        if self._spoke is not None:
            self._spoke.close()
        self._begin()

    def _complain(self, message: str) -> None:
        """Log why there is no session, because a router with another secret does not even refuse."""
        now_s = self._clock()
        if message != self._complaint or now_s - self._complained_s > COMPLAINT_INTERVAL_S:
            self._complaint, self._complained_s = message, now_s
            logger.error("%s", message)

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Refused):
            self._complain(f"the dispatcher refused this front: {message.reason}")
            self.problem = self._refusal = message.reason
            self._heard_s = self._clock()
            return
        handle = self._handlers.get(type(message))
        if handle is None or getattr(message, "session", None) != self._epoch:
            logger.warning("dropped %s, not of this session", type(message).__name__)
            return
        self._heard_s = self._clock()
        if not isinstance(message, NUMBERED) or self._follows(message.number):
            handle(message)

    def _follows(self, number: int) -> bool:
        """Count a message of the session; after a lost message, begin another session and return False."""
        self._num_received += 1
        if number == self._num_received:
            return True
        self._lose(f"message {self._num_received} of the dispatcher is lost")
        return False

    def _on_page(self, page: FrontPage) -> None:
        if (future := self._pages.pop(page.page, None)) is not None and not future.done():
            future.set_result(page.content)

    def _on_void(self, void: FrontVoid) -> None:
        self._lose(void.reason)

    def _on_welcome(self, _: FrontWelcome) -> None:
        if self._is_welcome:
            return
        self._is_welcome = True
        logger.info("the dispatcher at %s serves; open choices: %d", self.endpoint, len(self.open))
        for each in list(self.open.values()):
            if reason := each.finished_by_log():
                self._finish(each, reason)
            elif each.num_tries >= self._limits.max_attempts:
                message = f"{each.num_tries} sessions with the dispatcher ended without an output of this completion"
                self.fail([each], RequestError(message, code="internal_error", status=500))
            else:
                each.begin_again()
                self._send_order([each])

    def _on_news(self, news: FrontNews) -> None:
        if news.number != self._num_received:
            self._lose(f"message {self._num_received + 1} of the dispatcher is lost")
        else:
            self.news = news

    # --- orders ---------------------------------------------------------------------------------

    def _send_order(self, opens: Sequence[OpenChoice]) -> None:
        assert self._spoke is not None
        prompts, order = order_of(opens, self.front_id, self._epoch, self._num_sent + 1, self._clock())
        for prompt in prompts:
            self._spoke.send(FrontPrompt(self.front_id, self._epoch, self._next(), prompt))
        self._spoke.send(order)
        self._next()
        for each in opens:
            each.is_sent = True
            each.num_tries += 1

    def _done(self, tickets: Sequence[tuple[int, bool]]) -> None:
        """Tell of choices that need no more tokens, and whether a stop string was found."""
        if tickets and self._is_welcome and self._spoke is not None:
            ids, flags = pack_ids(ticket for ticket, _ in tickets), bytes(flag for _, flag in tickets)
            self._spoke.send(FrontDone(self.front_id, self._epoch, self._next(), ids, flags))

    def _next(self) -> int:
        self._num_sent += 1
        return self._num_sent

    # --- outputs --------------------------------------------------------------------------------

    def _on_tokens(self, batch: FrontTokens) -> None:
        for ticket, num_cached in zip(unpack_ids(batch.begun), unpack_ids(batch.num_cached), strict=True):
            if (known := self.open.get(ticket)) is not None:
                known.choice.output.num_cached = num_cached
        token_ids = unpack_ids(batch.token_ids)
        tokens = scored(batch, token_ids) if batch.num_logprobs else map(plain_token, token_ids)
        stopped: list[tuple[int, bool]] = []
        now_s, is_open = self._clock(), self.open.get
        for ticket, token, finish in zip(unpack_ids(batch.tickets), tokens, batch.finish_reasons, strict=True):
            if (each := is_open(ticket)) is None:
                continue
            try:
                self._take(each, token, finish, now_s, stopped)
            except Exception:
                logger.exception("[%s] a bug ends it", each.choice.spec.request_id)
                message = "the server hit an unexpected error with this completion; its log has the reason"
                self.fail([each], RequestError(message, code="internal_error", status=500))
        self._counts.num_tokens += len(token_ids)
        for ticket, reason in zip(unpack_ids(batch.ended), batch.ends, strict=True):
            if (each := is_open(ticket)) is not None:
                self._finish(each, REASONS[reason])
        self._done(stopped)

    def _take(
        self, each: OpenChoice, token: OutputToken, finish: int, now_s: float, stopped: list[tuple[int, bool]]
    ) -> None:
        choice = each.choice
        if not choice.output.token_ids:
            each.first_token_s = now_s
        each.num_tries = 0
        choice.output.token_ids.append(token.token_id)
        if choice.take(token, finish):
            self._finish(each, "stop")
            stopped.append((each.ticket, True))
        elif finish:
            self._finish(each, REASONS[finish])

    def _finish(self, each: OpenChoice, reason: str) -> None:
        each.choice.finish(reason)
        self.open.pop(each.ticket, None)
        each.end(self._clock())

    def _on_scores(self, scores: FrontScores) -> None:
        each = self.open.get(scores.ticket)
        if each is not None and (log := each.choice.output.prompt_log) is not None:
            report = PromptLogprobs(
                "", 0, "", 0, scores.first_position, scores.ranks, scores.num_logprobs, scores.logprob_ids,
                scores.logprobs,
            )  # fmt: skip
            log.take(report, self._info.vocab_size)

    def _on_failed(self, failed: FrontFailed) -> None:
        error = RequestError(
            failed.message,
            param=failed.param or None,
            code=failed.code,
            status=failed.status,
            retry_after_s=failed.retry_after_s or None,
        )
        ended = [self.open[ticket] for ticket in unpack_ids(failed.tickets) if ticket in self.open]
        for each in ended:
            each.is_sent = False  # the dispatcher has it no more
        self.fail(ended, error)
