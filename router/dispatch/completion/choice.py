"""A choice of an HTTP response: tokens become text, and text goes to the mailbox of the response."""

import asyncio
from dataclasses import dataclass, field

from msgspec import Struct

from common.base.errors import RequestError
from common.wire.messages.worker import FinishReason, PromptLogprobs
from common.wire.values.output_token import OutputToken
from router.dispatch.completion.journey import Watcher
from router.dispatch.completion.state import FINISH_REASONS, CompletionOutput, CompletionSpec
from router.text.detokenizer import TextStream
from router.text.logprobs import LogprobLog


class Delivery(Struct, frozen=True):
    """News of a choice for its HTTP response; the last has a finish reason or an error."""

    choice: int
    text: str
    num_outputs: int = 0  # outputs up to and including this delivery
    finish_reason: str | None = None
    error: RequestError | None = None


class Mailbox:
    """Deliveries of all choices of an HTTP request, in order, for a single reader."""

    def __init__(self) -> None:
        self._deliveries: list[Delivery] = []
        self._waiting: asyncio.Future[None] | None = None

    def put(self, delivery: Delivery) -> None:
        self._deliveries.append(delivery)
        self.wake()

    def wake(self) -> None:
        """End the reader's wait, also without a delivery."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> list[Delivery]:
        """Return everything that has arrived since the last call; wait for a delivery, or for `wake`."""
        if not self._deliveries:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        deliveries, self._deliveries = self._deliveries, []
        return deliveries


@dataclass(slots=True, eq=False)
class Choice:
    """The text of a completion, for its response; an `Outlet`.

    Whoever hands in a token has added the token to `output` before: the dispatcher, or the reader of its messages.
    """

    spec: CompletionSpec
    output: CompletionOutput
    text: TextStream
    mailbox: Mailbox
    logprobs: LogprobLog | None = None  # of the tokens, if asked for
    received_s: float = 0.0  # time of the request's first byte; 0 if unknown
    watcher: Watcher | None = None
    has_failed: bool = False
    last: str = field(default="", init=False)  # text of the token that ends the text

    def take(self, token: OutputToken, finish: int) -> bool:
        """Deliver the text of a token; see `Outlet.take`."""
        if self.logprobs is not None:
            self.logprobs.push(token)
        text = "" if finish and self._hides(token, finish) else self.text.push(token.token_id)
        has_stopped = bool(self.text.stop)
        if finish or has_stopped:
            self.last = text
        else:  # also without text, inside a character: every token has its chunk
            self.mailbox.put(Delivery(self.spec.index, text, len(self.output.token_ids)))
        return has_stopped

    def scored(self, report: PromptLogprobs) -> None:
        """Do nothing, because the response reads the log of the prompt."""

    def finish(self, finish_reason: str) -> str:
        """Deliver the rest of the text, which may complete a stop string; return the reason then."""
        text = self.last if self.text.stop else self.last + self.text.flush()
        reason = "stop" if self.text.stop else finish_reason
        self.output.finish_reason = reason
        self.mailbox.put(Delivery(self.spec.index, text, len(self.output.token_ids), reason))
        return reason

    def fail(self, error: RequestError) -> None:
        """Deliver an error."""
        self.has_failed = True
        self.mailbox.put(Delivery(self.spec.index, "", error=error))

    @property
    def is_over(self) -> bool:
        return self.has_failed or bool(self.output.finish_reason)

    @property
    def outcome(self) -> str:
        """The finish reason, or a word for another end."""
        return self.output.finish_reason or ("failed" if self.has_failed else "aborted")

    @property
    def stop_reason(self) -> str | int | None:
        """The client's stop string or stop token at the end of the text; None after another end."""
        if self.text.stop:
            return self.text.stop
        output = self.output
        if output.finish_reason != "stop" or not output.token_ids:
            return None
        return output.token_ids[-1] if output.token_ids[-1] in self.spec.stop_token_ids else None

    def end_with_prompt(self) -> None:
        """Finish without an output, because nothing has to be computed."""
        self.finish(FINISH_REASONS[FinishReason.LENGTH])

    def _hides(self, token: OutputToken, finish: int) -> bool:
        """Tell whether the last token is a stop token left out of the text."""
        spec = self.spec
        return finish == FinishReason.STOP and token.token_id in spec.sampling.stop_token_ids and not spec.include_stop
