"""Messages between a front and the dispatcher, a router with `router.front_endpoint`; `worker` has the rules for all.

A front holds prompts, sampling and outputs of open HTTP requests. The dispatcher has tokens computed. A session begins
with `FrontHello` and ends at the first lost message of either side: messages are numbered, and a gap voids the session.
The front then begins another session, and hands in what is open with the outputs so far. So no token is lost or told
twice, whatever dies or stands still.

A completion is known by a `ticket`, which the front counts over its life.
"""

from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from common.base.errors import WireError
from common.wire.messages.senders import FromFront
from common.wire.values.fields import (
    MAX_ROWS,
    Column,
    Count,
    Epoch,
    FinishReasons,
    Label,
    NumLogprobs,
    OptionalDigest,
    OptionalLabel,
    Packed,
    Positive,
    Priority,
    ProcessId,
    RequestId,
    ScoredIds,
    Scores,
    Text,
    TokenIds,
    Total,
    WireStruct,
)
from common.wire.values.packing import misscored, num_ids, uneven
from common.wire.values.sampling_params import SamplingParams

MAX_CHOICES = 1 << 17
"""Most completions of an HTTP request: 1,024 prompts with 128 choices each."""
MAX_FRAME_OUTPUTS = 8 << 20
"""Most bytes of a completion's outputs: two million tokens."""
MAX_PAGE_BYTES = 8 << 20
"""Most bytes of a page; hundreds of workers need less."""
Client = Annotated[str, Meta(max_length=4096)]


class FrontHello(FromFront, tag=110):
    """front -> dispatcher: begin a session, in which messages count from 1. Answered by `FrontWelcome` or `Refused`."""

    pid: ProcessId
    version: Label  # Baton's
    model_name: Label
    model_fingerprint: Label
    tokenizer_fingerprint: Label
    url: OptionalLabel  # for display: where HTTP is served


class FrontBeat(FromFront, tag=111):
    """front -> dispatcher: a sign of life."""

    number: Total  # of the last numbered message


class FrontPrompt(FromFront, tag=112):
    """front -> dispatcher: a prompt of the `FrontOrder` to come."""

    number: Total
    token_ids: TokenIds


class FrontChoice(WireStruct):
    """A completion of an order."""

    ticket: Count
    request_id: RequestId
    index: Count  # of the choice in the response
    prompt: Count  # place among the prompts sent since the last order
    seed: Total
    max_tokens: Positive
    outputs: Annotated[bytes, Meta(max_length=MAX_FRAME_OUTPUTS)]  # packed ids, made in an earlier session
    num_prompt_logprobs: NumLogprobs  # entries per prompt token, the token's own included; 0: none
    prompt_only: bool


class FrontOrder(FromFront, tag=113):
    """front -> dispatcher: the completions of an HTTP request, all or none of which are queued."""

    number: Total
    choices: Annotated[tuple[FrontChoice, ...], Meta(min_length=1, max_length=MAX_CHOICES)]
    sampling: SamplingParams  # of all, but `seed` and `max_tokens`
    client: Client  # the queue is fair between clients
    client_request_id: Annotated[str, Meta(max_length=128)]
    priority: Priority
    salt: OptionalDigest
    age_s: Annotated[float, Meta(ge=0.0, le=1e7)]  # since the HTTP request's submission

    def contradiction(self) -> str:
        problems = (self._problem_of(choice) for choice in self.choices)
        return self.sampling.problem(1, 0) or next(filter(None, problems), "")

    @staticmethod
    def _problem_of(choice: FrontChoice) -> str:
        if not choice.outputs:
            return ""
        try:
            Packed().checked(choice.outputs)
        except WireError as error:
            return f"outputs: {error}"
        num_outputs = num_ids(choice.outputs)
        return f"{num_outputs} outputs, {choice.max_tokens} wanted" if num_outputs >= choice.max_tokens else ""


class FrontDone(FromFront, tag=114):
    """front -> dispatcher: completions that need no more tokens."""

    number: Total
    tickets: Column
    have_stopped: Annotated[bytes, Meta(max_length=MAX_ROWS)]  # a byte each, 1: at a stop string; 0: the client left

    def contradiction(self) -> str:
        return uneven(num_ids(self.tickets), len(self.have_stopped))


class Page(IntEnum):
    """Page of the dispatcher that a front passes on to its own clients."""

    HEALTH = 1
    STATUS = 2


class FrontAsk(FromFront, tag=115):
    """front -> dispatcher: ask for a page. Answered by `FrontPage`."""

    page: Page


class FrontWelcome(WireStruct, tag=116):
    """dispatcher -> front: the session of the front's incarnation has begun."""

    session: Epoch  # that of the `FrontHello`


class FrontNews(WireStruct, tag=117):
    """dispatcher -> front: a sign of life, with what a front needs to refuse early."""

    session: Epoch
    number: Total  # of the last numbered message
    max_model_len: Count
    num_active: Count
    max_requests: Positive
    num_queued_tokens: Total
    max_queued_tokens: Total
    status: Label
    refuses: bool


class FrontTokens(WireStruct, tag=118):
    """dispatcher -> front: tokens of completions, in order, and ends, as columns.

    Scores are as in `LogprobBatch`, or empty if no token has any.
    """

    session: Epoch
    number: Total
    tickets: Column
    token_ids: Column
    finish_reasons: FinishReasons
    num_logprobs: Column
    logprob_ids: ScoredIds
    logprobs: Scores
    begun: Column  # tickets of first tokens here, in whose prompts
    num_cached: Column  # so many tokens were cached
    ended: Column  # tickets whose last token is here or was sent before
    ends: FinishReasons

    def contradiction(self) -> str:
        rows = num_ids(self.tickets)
        problem = uneven(rows, num_ids(self.token_ids), len(self.finish_reasons))
        problem = problem or uneven(num_ids(self.begun), num_ids(self.num_cached))
        problem = problem or uneven(num_ids(self.ended), len(self.ends))
        if problem or not (self.num_logprobs or self.logprob_ids or self.logprobs):
            return problem
        return misscored(rows, self.num_logprobs, self.logprob_ids, self.logprobs)


class FrontScores(WireStruct, tag=119):
    """dispatcher -> front: log-probabilities of a prompt, as in `PromptLogprobs`."""

    session: Epoch
    number: Total
    ticket: Count
    first_position: Positive
    ranks: Column
    num_logprobs: Column
    logprob_ids: ScoredIds
    logprobs: Scores

    def contradiction(self) -> str:
        return misscored(num_ids(self.ranks), self.num_logprobs, self.logprob_ids, self.logprobs)


class FrontFailed(WireStruct, tag=120):
    """dispatcher -> front: completions ended with an error, told to the client in these words."""

    session: Epoch
    number: Total
    tickets: Column
    message: Text
    param: OptionalLabel
    code: Label
    status: Annotated[int, Meta(ge=400, le=599)]
    retry_after_s: Count  # 0: none


class FrontPage(WireStruct, tag=121):
    """dispatcher -> front: a page as asked for, JSON or text."""

    session: Epoch
    page: Page
    content: Annotated[bytes, Meta(max_length=MAX_PAGE_BYTES)]


class FrontVoid(WireStruct, tag=122):
    """dispatcher -> front: the session is over, by a lost message or a silence; begin another."""

    session: Epoch
    reason: Text


FrontMessage = (
    FrontHello | FrontBeat | FrontPrompt | FrontOrder | FrontDone | FrontAsk
    | FrontWelcome | FrontNews | FrontTokens | FrontScores | FrontFailed | FrontPage | FrontVoid
)  # fmt: skip
