"""The state of a completion: what was asked for, the token log, and the place in the router.

Invariant: a completion reaches exactly one terminal state, once. The token log (prompt and outputs) is complete at any
moment, so any worker can start the completion again.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from common.base.errors import RequestError
from common.wire.messages.worker import FinishReason, PromptLogprobs
from common.wire.values.output_token import OutputToken
from common.wire.values.sampling_params import SamplingParams
from router.dispatch.completion.attempt import Attempt, Failures
from router.dispatch.completion.journey import Journey, Phase, PhaseTimes, Timing
from router.placement.member import Member
from router.placement.route import Demand
from router.placement.text_keys import TextKeys
from router.text.prompt_log import PromptLog

ID_PREFIX = "cmpl-"


def new_response_id() -> str:
    """Make the id of an HTTP response; its completions add `-<choice>`."""
    return f"{ID_PREFIX}{secrets.token_hex(8)}"


class State(Enum):
    QUEUED = "queued"
    PREFILLING = "prefilling"  # sent; includes the handoff
    DECODING = "decoding"  # the decode worker has made a token, and needs no other worker
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"


TERMINAL = frozenset({State.FINISHED, State.FAILED, State.ABORTED})
NEXT = {
    State.QUEUED: TERMINAL | {State.PREFILLING},
    State.PREFILLING: TERMINAL | {State.DECODING, State.QUEUED},
    State.DECODING: TERMINAL | {State.QUEUED},
}


class Outlet(Protocol):
    """The taker of a completion's outputs: the text of an HTTP response, or the connection of a front."""

    def take(self, token: OutputToken, finish: int) -> bool:
        """Take the next token, just added to the log; return True if a stop string of the client ends the text.

        After a token that ends the text, by `finish` (see `FinishReason`) or by a stop string, `finish` follows.
        """
        ...

    def scored(self, report: PromptLogprobs) -> None:
        """Take log-probabilities of the prompt, just added to the log."""
        ...

    def finish(self, finish_reason: str) -> str:
        """End the outputs; return the reason for the client, which a stop string may change."""
        ...

    def fail(self, error: RequestError) -> None:
        """End the outputs with an error."""
        ...


@dataclass(frozen=True, slots=True)
class CompletionSpec:
    """Parameters of a completion, as asked for by the client; never changed."""

    request_id: str
    index: int  # of the choice in the response
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    client: str = ""  # the queue is fair between clients; "" is every anonymous client
    client_request_id: str = ""  # for the log; may be anything, and need not be unique
    priority: int = 0  # lower is earlier, before everything else
    salt: bytes = b""  # KV of the prompt is shared only among prompts of equal salt
    stop_token_ids: tuple[int, ...] = ()  # the client's own; those in `sampling` include the model's end of text
    include_stop: bool = False  # the text includes the stop string or stop token
    echo: str = ""  # the prompt's text, if the reply begins with the prompt
    prompt_only: bool = False  # the client wants no output: the token that ends the prompt's computation is dropped

    @property
    def max_total_tokens(self) -> int:
        """Prompt tokens plus the most outputs."""
        return len(self.prompt_ids) + self.sampling.max_tokens


@dataclass(slots=True, eq=False)
class CompletionOutput:
    """The token log of a completion, over all attempts."""

    token_ids: list[int] = field(default_factory=list)
    prompt_log: PromptLog | None = None  # log-probabilities of the prompt, if asked for
    num_cached: int = 0  # prompt tokens not computed for the first output
    finish_reason: str = ""

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """True while log-probabilities of the prompt are missing."""
        return self.prompt_log is not None and not self.prompt_log.is_complete


@dataclass(slots=True)
class CompletionTimes:
    """Times of a completion, in seconds of the dispatcher's clock; 0 for an event still to come."""

    received_s: float = 0.0  # the request began to come in
    submitted_s: float = 0.0
    queued_s: float = 0.0  # of the present attempt
    untakable_since_s: float = 0.0  # no worker takes the completion, busy or not; 0 when some worker does
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    phases: PhaseTimes = field(default_factory=PhaseTimes)


@dataclass(slots=True, eq=False)
class Completion:
    """The computation of a choice of an HTTP request: parameters, results, and place in the router."""

    spec: CompletionSpec
    output: CompletionOutput
    outlet: Outlet
    times: CompletionTimes = field(default_factory=CompletionTimes)
    state: State = State.QUEUED
    attempt: Attempt = field(default_factory=Attempt)
    failures: Failures = field(default_factory=Failures)
    texts: tuple[TextKeys, ...] = ()  # block keys of the tokens, made if placement depends on keys
    turn: int = 0  # place among completions of a priority
    number: int = -1  # of all ever queued
    avoided: Member | None = None  # gave the last attempt back
    takes_trip: bool = False  # a decode worker gave the prompt back, because too little was cached there
    num_passing: int = 0  # computed tokens of passing completions (see `scheduler`)
    journey: Journey | None = None  # None without a watcher
    timing: Timing | None = None  # once the completion is over, if a worker was to compute it

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL

    @property
    def is_suspect(self) -> bool:
        """True if workers died with the completion, so that it may be the cause."""
        return self.failures.is_suspect

    @property
    def num_tokens(self) -> int:
        """Tokens to compute before the next output: the prompt, and after a replay the outputs so far."""
        return len(self.spec.prompt_ids) + len(self.output.token_ids)

    @property
    def may_be_handed_over(self) -> bool:
        """True if a prefill worker computes the prompt, and outputs may follow the first of this attempt."""
        has_more = self.attempt.first_index + 1 < self.spec.sampling.max_tokens
        return self.attempt.is_split and not self.spec.prompt_only and has_more

    def is_handed_over_by(self, worker: Member) -> bool:
        """Tell whether `worker` has offered the prompt's blocks; the memory server keeps the offer after any death."""
        route = self.attempt.route
        if route is None or route.is_local or worker is not route.prefill:
            return False
        return self.state is State.PREFILLING and not self.attempt.sent_tokens

    def accepts(self, token: OutputToken, vocab_size: int) -> bool:
        """Tell whether `token` can be the next: a token of the model, with the log-probabilities asked for."""
        if not 0 <= token.token_id < vocab_size:
            return False
        if not self.spec.sampling.num_logprobs or (reported := token.logprobs) is None:
            return not self.spec.sampling.num_logprobs
        return reported.token_ids[0] == token.token_id and max(reported.token_ids) < vocab_size

    def tokens_from(self, begin: int) -> list[int]:
        """Return prompt and outputs without the first `begin` tokens."""
        prompt_ids = self.spec.prompt_ids
        return [*prompt_ids[begin:], *self.output.token_ids[max(0, begin - len(prompt_ids)) :]]

    def demand(self) -> Demand:
        """Return the requirements of the next attempt."""
        return Demand(
            num_tokens=self.num_tokens,
            max_total_tokens=self.spec.max_total_tokens,
            avoided=self.avoided,
            is_trial=self.failures.is_suspect,
            texts=() if self.output.lacks_prompt_logprobs else self.texts,
            takes_trip=self.takes_trip,
        )

    def update_takers(self, longest: int, now_s: float) -> None:
        """Record since when no worker takes the completion; `longest` is the most tokens that a worker takes."""
        if self.spec.max_total_tokens <= longest:
            self.times.untakable_since_s = 0.0
        elif not self.times.untakable_since_s:
            self.times.untakable_since_s = now_s

    def move_to(self, state: State) -> None:
        """Change state; a wrong order is a bug."""
        assert not self.is_terminal and state in NEXT[self.state], f"{self.spec.request_id}: {self.state} -> {state}"
        self.state = state

    def enter(self, phase: Phase, now_s: float) -> float:
        """Go to the next phase; return the seconds since the last phase began."""
        if self.journey is not None:
            self.journey.enter(phase, now_s, self.attempt.number, self.attempt.route)
        return self.times.phases.enter(phase, now_s)

    def already_finished(self) -> str:
        """Return the finish reason by the token log alone, or an empty string."""
        token_ids, sampling = self.output.token_ids, self.spec.sampling
        if token_ids and token_ids[-1] in sampling.stop_token_ids:
            return FINISH_REASONS[FinishReason.STOP]
        if len(token_ids) >= sampling.max_tokens:
            return FINISH_REASONS[FinishReason.LENGTH]
        return ""

    def begin_attempt(self) -> None:
        """Replace the attempt by the next, which computes prompt and outputs so far."""
        self.attempt = Attempt(self.attempt.number + 1, len(self.output.token_ids))
        self.texts = tuple(text.grown(self.tokens_from(text.num_tokens)) for text in self.texts)


FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
