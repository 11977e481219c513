"""The state of one completion, and the mailbox in which its HTTP response finds what is ready.

Invariant: a completion reaches exactly one terminal state, once. Its token log (prompt and outputs)
is complete at any moment, so that it can be started again anywhere.
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from common.base.errors import RequestError
from common.wire.messages.worker import FinishReason
from common.wire.values.output_token import OutputToken
from common.wire.values.sampling_params import SamplingParams
from router.base.shapes import ChoiceTiming
from router.dispatch.attempt import Attempt, Failures
from router.dispatch.journey import Journey
from router.dispatch.phases import Phase, PhaseTimes
from router.placement.member import Member
from router.placement.route import Demand
from router.placement.text_keys import TextKeys
from router.text.detokenizer import TextStream
from router.text.logprobs import LogprobLog
from router.text.prompt_log import PromptLog

ID_PREFIX = "cmpl-"


def new_response_id() -> str:
    """Make the id of one HTTP response; its completions add `-<choice>`."""
    return f"{ID_PREFIX}{secrets.token_hex(8)}"


class State(Enum):
    QUEUED = "queued"
    PREFILLING = "prefilling"  # sent; includes the handoff
    DECODING = "decoding"  # the decode worker has produced a token: it needs nobody else any more
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"


CRASHES_BEFORE_TRIAL = 2
"""Trials of all that a worker had, one after the other, would take longer than replays of all together."""

TERMINAL = frozenset({State.FINISHED, State.FAILED, State.ABORTED})
NEXT = {
    State.QUEUED: TERMINAL | {State.PREFILLING},
    State.PREFILLING: TERMINAL | {State.DECODING, State.QUEUED},
    State.DECODING: TERMINAL | {State.QUEUED},
}


class Delivery(NamedTuple):
    """News of one completion for its HTTP response; the last one has a finish reason or an error."""

    choice: int
    text: str
    num_outputs: int = 0  # tokens up to and with this one
    finish_reason: str | None = None
    error: RequestError | None = None


class Mailbox:
    """Deliveries of all completions of one HTTP request, in order; one reader."""

    def __init__(self) -> None:
        self._deliveries: list[Delivery] = []
        self._waiting: asyncio.Future[None] | None = None

    def put(self, delivery: Delivery) -> None:
        self._deliveries.append(delivery)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> list[Delivery]:
        """Everything that has arrived since the last call; waits for the first."""
        if not self._deliveries:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        deliveries, self._deliveries = self._deliveries, []
        return deliveries


@dataclass(slots=True, eq=False)
class Completion:
    """One choice of one HTTP request: a prompt, its token log and where it stands.

    `index` is the choice's index in the response. All times are seconds of the dispatcher's clock.
    """

    request_id: str
    index: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    text: TextStream
    mailbox: Mailbox
    client: str = ""  # between whom the queue is fair; "" is whoever does not say
    client_request_id: str = ""  # for the log; may be anything, and anybody's
    priority: int = 0  # lower is earlier, before everything else
    texts: tuple[TextKeys, ...] = ()  # keys of its prompt, where it makes a difference in which pool blocks are
    salt: bytes = b""  # KV of its prompt is shared with prompts of the same one alone
    stop_token_ids: tuple[int, ...] = ()  # of those in `sampling` what the client named: the end of the text is not
    include_stop: bool = False  # what ends the text is part of it
    turn: int = 0  # its place among completions of one priority
    number: int = -1  # of all that were ever queued
    state: State = State.QUEUED
    outputs: list[int] = field(default_factory=list)
    logprobs: LogprobLog | None = None  # of the outputs, if asked for
    prompt_log: PromptLog | None = None  # how likely the prompt's tokens were, if asked for
    echo: str = ""  # the prompt's text, if it stands before the outputs
    prompt_only: bool = False  # no output is wanted: the one that ends the prompt's computation is dropped
    attempt: Attempt = field(default_factory=Attempt)
    failures: Failures = field(default_factory=Failures)
    phases: PhaseTimes = field(default_factory=PhaseTimes)
    avoided: Member | None = None  # gave the last attempt back
    takes_trip: bool = False  # a decode worker gave it back, as too little of it was there
    num_passing: int = 0  # tokens computed of those that passed it, as their beginnings were where there was room
    num_cached: int = 0  # of its prompt, tokens that need not be computed for its first output
    finish_reason: str = ""
    journey: Journey | None = None  # if somebody watches
    timing: ChoiceTiming | None = None  # once it is over, if a worker was to compute it
    received_s: float = 0.0  # the request began to come in
    submitted_s: float = 0.0
    queued_s: float = 0.0
    untakable_since_s: float = 0.0  # no worker takes it, busy or not; 0 when one does
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL

    @property
    def num_tokens(self) -> int:
        """Tokens to compute before the next output: the prompt, and after a replay the outputs so far."""
        return len(self.prompt_ids) + len(self.outputs)

    @property
    def max_total_tokens(self) -> int:
        """Prompt and the most outputs it may have."""
        return len(self.prompt_ids) + self.sampling.max_tokens

    @property
    def is_suspect(self) -> bool:
        """Workers died with it so often that its next attempt must show whose fault it was."""
        return self.failures.num_crashes >= CRASHES_BEFORE_TRIAL

    @property
    def may_be_handed_over(self) -> bool:
        """Whether a prefill worker computes its prompt, and outputs may follow the first of this attempt."""
        has_more = self.attempt.first_index + 1 < self.sampling.max_tokens
        return self.attempt.is_split and not self.prompt_only and has_more

    def is_handed_over_by(self, worker: Member) -> bool:
        """Whether that prefill worker has offered the blocks: the memory server has that offer, whoever dies."""
        route = self.attempt.route
        if route is None or route.is_local or worker is not route.prefill:
            return False
        return self.state is State.PREFILLING and not self.attempt.sent_tokens

    @property
    def stop_reason(self) -> str | int | None:
        """The client's stop string or stop token that ended it; None if something else did."""
        if self.text.stop:
            return self.text.stop
        ends_it = self.finish_reason == "stop" and bool(self.outputs) and self.outputs[-1] in self.stop_token_ids
        return self.outputs[-1] if ends_it else None

    def tokens_from(self, begin: int) -> list[int]:
        """Prompt and outputs behind the first `begin` of these tokens."""
        return [*self.prompt_ids[begin:], *self.outputs[max(0, begin - len(self.prompt_ids)) :]]

    def demand(self) -> Demand:
        """What the next attempt asks of workers."""
        looked_up = self.texts if self.prompt_log is None or self.prompt_log.is_complete else ()
        return Demand(self.num_tokens, self.max_total_tokens, self.avoided, self.is_suspect, looked_up, self.takes_trip)

    def note_takers(self, longest: int, now_s: float) -> None:
        """Some worker takes `longest` tokens, none takes more."""
        if self.max_total_tokens <= longest:
            self.untakable_since_s = 0.0
        elif not self.untakable_since_s:
            self.untakable_since_s = now_s

    def takes(self, token: OutputToken, vocab_size: int) -> bool:
        """Whether it can be the next output: a token of the model, with what was asked about it."""
        if not 0 <= token.token_id < vocab_size:
            return False
        told = token.logprobs
        if self.logprobs is None or told is None:
            return self.logprobs is None
        return told.token_ids[0] == token.token_id and max(told.token_ids) < vocab_size

    def log(self, token: OutputToken) -> None:
        """Append to the outputs a token that it takes."""
        self.outputs.append(token.token_id)
        if self.logprobs is not None:
            self.logprobs.push(token)

    def move_to(self, state: State) -> None:
        """Change state; a wrong order is a bug."""
        assert not self.is_terminal and state in NEXT[self.state], f"{self.request_id}: {self.state} -> {state}"
        self.state = state

    def enter(self, phase: Phase, now_s: float) -> float:
        """Go to the next phase; returns the seconds since the last one began."""
        if self.journey is not None:
            self.journey.enter(phase, now_s, self.attempt.number, self.attempt.route)
        return self.phases.enter(phase, now_s)

    def already_finished(self) -> str:
        """The finish reason that the token log itself shows, or an empty string."""
        if self.outputs and self.outputs[-1] in self.sampling.stop_token_ids:
            return FINISH_REASONS[FinishReason.STOP]
        if len(self.outputs) >= self.sampling.max_tokens:
            return FINISH_REASONS[FinishReason.LENGTH]
        return ""

    def begin_attempt(self) -> None:
        """Replace the attempt by the next, which computes prompt and outputs so far."""
        self.attempt = Attempt(self.attempt.number + 1, len(self.outputs))
        self.texts = tuple(text.grown(self.tokens_from(text.num_tokens)) for text in self.texts)


FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
