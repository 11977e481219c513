"""All fronts of a dispatcher: their sessions, orders, silence, and the pages that they pass on."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from common.base.errors import RequestError
from common.settings.config import NetSection, RouterSection
from common.wire.messages.fronts import (
    MAX_PAGE_BYTES,
    FrontAsk,
    FrontBeat,
    FrontDone,
    FrontHello,
    FrontNews,
    FrontOrder,
    FrontPage,
    FrontPrompt,
    FrontVoid,
    FrontWelcome,
    Page,
)
from common.wire.messages.senders import FromFront
from common.wire.messages.worker import Message, Refused
from common.wire.messages.worker_id import connection_of
from common.wire.values.packing import num_ids, unpack_array, unpack_ids
from router.base.json_rules import wrong
from router.dispatch.completion.state import Completion
from router.dispatch.dispatcher import Dispatcher
from router.sessions.orders import completions_of
from router.sessions.session import Session, SessionOutlet
from router.text.model_info import ModelInfo
from router.workers.hub import Handlers, SendTo, Undelivered

logger = logging.getLogger(__name__)

MAX_FRONTS = 256


class State(Protocol):
    """State of the system, of which fronts are told."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def status_name(self) -> str: ...
    async def page(self, page: Page) -> bytes: ...


class Fronts:
    """Handlers of fronts' messages, each taking the connection's identity and the message.

    Args:
        send: queues a message for a connection.
    """

    def __init__(
        self,
        limits: RouterSection,
        net: NetSection,
        info: ModelInfo,
        dispatcher: Dispatcher,
        send: SendTo,
        state: State,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._net, self._info, self._dispatcher = limits, net, info, dispatcher
        self._send, self._state, self._clock = send, state, clock
        self._sessions: dict[str, Session] = {}  # by front
        self._tasks: set[asyncio.Task[None]] = set()
        self._checked_s = clock()

    def __len__(self) -> int:
        return len(self._sessions)

    def handlers(self) -> Handlers:
        """Return the handler of each message type that fronts send."""
        return {
            FrontHello: self.on_hello,
            FrontBeat: self.on_beat,
            FrontPrompt: self.on_prompt,
            FrontOrder: self.on_order,
            FrontDone: self.on_done,
            FrontAsk: self.on_ask,
        }

    def on_hello(self, identity: bytes, hello: FrontHello) -> None:
        """Begin a session, which ends the front's session before; or refuse a front of another model."""
        if reason := self._objection(hello):
            logger.warning("refused front %s: %s", hello.front_id, reason)
            self._send(identity, Refused(reason))
            return
        if (known := self._sessions.get(hello.front_id)) is not None and known.hello.epoch != hello.epoch:
            self._void(known, "another session of this front began")
            known = None
        if known is None:
            self._sessions[hello.front_id] = Session(
                hello, self._clock(), lambda message: self._tell(identity, message), self._dispatcher.scheduler.defer
            )
            logger.info("front %s joined, %s", hello.front_id, hello.url or "without a port")
        self._send(identity, FrontWelcome(hello.epoch))
        self._send_news(self._sessions[hello.front_id])

    def on_beat(self, identity: bytes, beat: FrontBeat) -> None:
        """Note a sign of life; void a session with a lost message."""
        session = self._session(identity, beat)
        if session is not None and beat.number != session.num_received:
            self._void(session, f"message {session.num_received + 1} of the front is lost")

    def on_prompt(self, identity: bytes, prompt: FrontPrompt) -> None:
        """Keep a prompt for the order to come."""
        session = self._numbered(identity, prompt, prompt.number)
        if session is None:
            return
        if sum(map(len, session.prompts)) + num_ids(prompt.token_ids) > self._limits.max_queued_tokens:
            self._void(session, "prompts of an order exceed router.max_queued_tokens")
        else:
            session.prompts.append(unpack_array(prompt.token_ids))

    def on_order(self, identity: bytes, order: FrontOrder) -> None:
        """Make and queue completions; a refusal goes to the front as their error."""
        session = self._numbered(identity, order, order.number)
        if session is None:
            return
        prompts, session.prompts = session.prompts, []
        try:
            if order.priority < self._limits.min_priority:
                raise wrong("priority", order.priority, f"at least router.min_priority, {self._limits.min_priority}")
            made = completions_of(order, prompts, self._info.vocab_size, partial(SessionOutlet, session))
            self._dispatcher.admit(len(made), sum(len(each.spec.prompt_ids) for each in made.values()))
        except RequestError as error:
            session.fail([choice.ticket for choice in order.choices], error)
            return
        session.completions |= made
        task = asyncio.get_running_loop().create_task(self._submit(session, made, order.age_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit(self, session: Session, made: dict[int, Completion], age_s: float) -> None:
        for _ in self._dispatcher.prepare(made.values()):
            await asyncio.sleep(0)
        wanted = [each for ticket, each in made.items() if session.is_open and ticket in session.completions]
        if not wanted:
            return
        for completion in wanted:
            known = self._dispatcher.lifecycle.active.get(completion.spec.request_id)
            if known is not None and isinstance(known.outlet, SessionOutlet) and not known.outlet.is_open:
                self._dispatcher.abort(known)  # of the session before, whose completions end a few at a time
            elif known is not None:
                self._void(session, f"{completion.spec.request_id} runs already")
                return
        try:
            self._dispatcher.submit(wanted)
        except RequestError as error:
            session.fail([ticket for ticket in made if ticket in session.completions], error)
            return
        for completion in wanted:
            completion.times.submitted_s -= age_s

    def on_done(self, identity: bytes, done: FrontDone) -> None:
        """End completions that the front needs no more."""
        session = self._numbered(identity, done, done.number)
        if session is None:
            return
        left: list[Completion] = []
        for ticket, has_stopped in zip(unpack_ids(done.tickets), done.have_stopped, strict=True):
            completion = session.completions.pop(ticket, None)
            if completion is None or not self._is_active(completion):
                continue
            if has_stopped:
                self._dispatcher.stop(completion)
            else:
                left.append(completion)
        self._dispatcher.abort(*left)

    def on_ask(self, identity: bytes, ask: FrontAsk) -> None:
        """Answer with a page, once made."""
        session = self._session(identity, ask)
        if session is not None:
            task = asyncio.get_running_loop().create_task(self._answer(identity, session, ask.page))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, identity: bytes, session: Session, page: Page) -> None:
        content = await self._state.page(page)
        if len(content) <= MAX_PAGE_BYTES:
            self._tell(identity, FrontPage(session.hello.epoch, page, content))

    def on_unreachable(self, undelivered: Undelivered) -> None:
        """End sessions with lost connections; a living front begins another."""
        gone = {identity for identity, _ in undelivered}
        for session in list(self._sessions.values()):
            if _connection(session) in gone:
                self._void(session, "its connection is gone")

    def check(self) -> None:
        """End silent sessions, and tell the news to all others; call a few times a second."""
        now_s = self._clock()
        asleep_s, self._checked_s = now_s - self._checked_s, now_s
        for session in list(self._sessions.values()):
            if asleep_s > self._net.worker_timeout_s / 2:
                session.heard_s = now_s  # this process stood still, and fronts may have spoken
            if now_s - session.heard_s > self._net.worker_timeout_s:
                self._void(session, f"silent for {now_s - session.heard_s:.1f} s")
            else:
                self._send_news(session)

    def close(self) -> None:
        """End all sessions; fronts hand their completions to the next dispatcher."""
        for session in list(self._sessions.values()):
            self._void(session, "the dispatcher ends")

    def _send_news(self, session: Session) -> None:
        dispatcher, limits = self._dispatcher, self._limits
        news = FrontNews(
            session.hello.epoch, session.num_sent, self._state.max_model_len, dispatcher.num_active,
            limits.max_requests, dispatcher.queue_sizes()[1], limits.max_queued_tokens, self._state.status_name,
            dispatcher.refusing,
        )  # fmt: skip
        self._tell(_connection(session), news)

    def _tell(self, identity: bytes, message: Message) -> None:
        self._send(identity, message)

    def _session(self, identity: bytes, message: FromFront) -> Session | None:
        """Return the session of a message; tell a front without one."""
        session = self._sessions.get(message.front_id)
        if session is None or session.hello.epoch != message.epoch:
            self._send(identity, FrontVoid(message.epoch, "the dispatcher has no such session"))
            return None
        session.heard_s = self._clock()
        return session

    def _numbered(self, identity: bytes, message: FromFront, number: int) -> Session | None:
        session = self._session(identity, message)
        if session is not None and not session.follows(number):
            self._void(session, f"message {session.num_received} of the front is lost")
            return None
        return session

    def _void(self, session: Session, reason: str) -> None:
        """End a session and all its completions."""
        if not session.is_open:
            return
        session.is_open = False
        del self._sessions[session.hello.front_id]
        left = [each for each in session.completions.values() if self._is_active(each)]
        logger.warning("front %s is lost: %s; its completions: %d", session.hello.front_id, reason, len(left))
        self._send(_connection(session), FrontVoid(session.hello.epoch, reason))
        session.completions.clear()
        self._dispatcher.abort(*left)

    def _is_active(self, completion: Completion) -> bool:
        """Tell whether a completion was submitted and is not over."""
        return self._dispatcher.lifecycle.active.get(completion.spec.request_id) is completion

    def _objection(self, hello: FrontHello) -> str:
        """Return the reason against a front; empty if admitted."""
        info = self._info
        if hello.front_id not in self._sessions and len(self._sessions) >= MAX_FRONTS:
            return f"{MAX_FRONTS} fronts are registered, which is the limit"
        pairs = {
            "model name": (info.name, hello.model_name),
            "model fingerprint": (info.model_fingerprint, hello.model_fingerprint),
            "tokenizer fingerprint": (info.tokenizer_fingerprint, hello.tokenizer_fingerprint),
        }
        return "; ".join(
            f"{what} is {there:.100}, the dispatcher's is {ours}; give both the same [model]"
            for what, (ours, there) in pairs.items()
            if ours != there
        )


def _connection(session: Session) -> bytes:
    return connection_of(session.hello.front_id, session.hello.epoch)
