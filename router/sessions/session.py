"""A front's session: completions by ticket, and the messages to the front, numbered.

Tokens of all completions are gathered and sent once in a turn of the event loop: messages cost more than tokens.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from common.base.errors import RequestError
from common.wire.messages.fronts import FrontFailed, FrontHello, FrontScores, FrontTokens
from common.wire.messages.worker import FinishReason, Message, PromptLogprobs
from common.wire.values.fields import MAX_ROWS
from common.wire.values.output_token import OutputToken
from common.wire.values.packing import pack_floats, pack_ids
from router.dispatch.completion.state import FINISH_REASONS, Completion, CompletionOutput

REASONS = {name: reason for reason, name in FINISH_REASONS.items()}
MAX_FRONT_ROWS = MAX_ROWS // 8
"""Most tokens in a message."""


@dataclass(slots=True)
class _Columns:
    """News gathered for the next `FrontTokens`."""

    tickets: list[int] = field(default_factory=list)
    tokens: list[OutputToken] = field(default_factory=list)
    finish_reasons: bytearray = field(default_factory=bytearray)
    begun: list[int] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    ends: bytearray = field(default_factory=bytearray)
    are_scored: bool = False

    def __bool__(self) -> bool:
        return bool(self.tickets or self.ended)

    def message(self, session: int, number: int) -> FrontTokens:
        scores = [token.logprobs or ((), ()) for token in self.tokens] if self.are_scored else []
        return FrontTokens(
            session,
            number,
            pack_ids(self.tickets),
            pack_ids([token.token_id for token in self.tokens]),
            bytes(self.finish_reasons),
            pack_ids(len(values) for _, values in scores),
            pack_ids(token_id for ids, _ in scores for token_id in ids),
            pack_floats(value for _, values in scores for value in values),
            pack_ids(self.begun),
            pack_ids(self.num_cached),
            pack_ids(self.ended),
            bytes(self.ends),
        )


class Session:
    """A front at the dispatcher, from `FrontHello` until a lost message, a silence or another session.

    Args:
        send: queues a message for the front; the message is lost if the front is gone.
        defer: schedules a call after all other tasks had a turn.
    """

    def __init__(
        self,
        hello: FrontHello,
        now_s: float,
        send: Callable[[Message], None],
        defer: Callable[[Callable[[], None]], object],
    ) -> None:
        self.hello, self.heard_s = hello, now_s
        self.completions: dict[int, Completion] = {}  # not over, by ticket
        self.prompts: list[array[int]] = []  # of the order to come
        self.num_received = self.num_sent = 0  # numbered messages
        self.is_open = True
        self._send, self._defer = send, defer
        self._columns = _Columns()
        self._is_scheduled = False

    def follows(self, number: int) -> bool:
        """Count a received message; return False if one before is lost."""
        self.num_received += 1
        return number == self.num_received

    def add(self, ticket: int, token: OutputToken, finish: int) -> None:
        """Send a token soon."""
        columns = self._columns
        columns.tickets.append(ticket)
        columns.tokens.append(token)
        columns.finish_reasons.append(finish)
        if token.logprobs is not None:
            columns.are_scored = True
        if not self._is_scheduled:
            self._schedule()
        if len(columns.tickets) >= MAX_FRONT_ROWS:
            self.flush()

    def begin(self, ticket: int, num_cached: int) -> None:
        """Tell with the next tokens how much of a prompt was cached."""
        self._columns.begun.append(ticket)
        self._columns.num_cached.append(num_cached)

    def end(self, ticket: int, reason: FinishReason) -> None:
        """Tell the end of a completion, behind its tokens."""
        if self.completions.pop(ticket, None) is not None:
            self._columns.ended.append(ticket)
            self._columns.ends.append(reason)
            if not self._is_scheduled:
                self._schedule()

    def scored(self, ticket: int, report: PromptLogprobs) -> None:
        """Send log-probabilities of a prompt, which come before its tokens."""
        self.flush()
        self._send_numbered(
            FrontScores(
                self.hello.epoch, self._next(), ticket, report.first_position, report.ranks, report.num_logprobs,
                report.logprob_ids, report.logprobs,
            )
        )  # fmt: skip

    def fail(self, tickets: list[int], error: RequestError) -> None:
        """Send an error behind all tokens."""
        for ticket in tickets:
            self.completions.pop(ticket, None)
        self.flush()
        self._send_numbered(
            FrontFailed(
                self.hello.epoch, self._next(), pack_ids(tickets), error.message[:1000], error.param or "", error.code,
                error.status, error.retry_after_s or 0,
            )
        )  # fmt: skip

    def flush(self) -> None:
        """Send what is gathered."""
        self._is_scheduled = False
        if self._columns:
            columns, self._columns = self._columns, _Columns()
            self._send_numbered(columns.message(self.hello.epoch, self._next()))

    def _schedule(self) -> None:
        self._is_scheduled = True
        self._defer(self.flush)

    def _next(self) -> int:
        self.num_sent += 1
        return self.num_sent

    def _send_numbered(self, message: Message) -> None:
        if self.is_open:
            self._send(message)


class SessionOutlet:
    """The `Outlet` of a front's completion."""

    __slots__ = ("_output", "_session", "_ticket")

    def __init__(self, session: Session, ticket: int, output: CompletionOutput) -> None:
        self._session, self._ticket, self._output = session, ticket, output

    def take(self, token: OutputToken, finish: int) -> bool:
        """Send a token; the front finds stop strings, and tells."""
        output = self._output
        if output.num_cached and len(output.token_ids) == 1:
            self._session.begin(self._ticket, output.num_cached)
        self._session.add(self._ticket, token, finish)
        return False

    def scored(self, report: PromptLogprobs) -> None:
        self._session.scored(self._ticket, report)

    def finish(self, finish_reason: str) -> str:
        if self._output.num_cached and not self._output.token_ids:
            self._session.begin(self._ticket, self._output.num_cached)
        self._session.end(self._ticket, REASONS[finish_reason])
        return finish_reason

    def fail(self, error: RequestError) -> None:
        self._session.fail([self._ticket], error)

    @property
    def is_open(self) -> bool:
        return self._session.is_open
