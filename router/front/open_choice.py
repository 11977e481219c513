"""A choice that a dispatcher computes, the messages that hand it in, and its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from common.wire.messages.fronts import FrontChoice, FrontOrder, FrontTokens
from common.wire.values.output_token import Logprobs, OutputToken
from common.wire.values.packing import pack_ids, unpack_floats, unpack_ids
from router.dispatch.completion.choice import Choice
from router.dispatch.completion.journey import End
from router.dispatch.completion.state import FINISH_REASONS
from router.text.prompt_log import PromptLog


@dataclass(slots=True, eq=False)
class OpenChoice:
    """A choice until its end; survives sessions. Times are of `time.monotonic`."""

    ticket: int
    choice: Choice
    submitted_s: float
    first_token_s: float = 0.0
    is_sent: bool = False  # in the present session
    num_tries: int = 0  # sessions in a row that brought no output

    def finished_by_log(self) -> str:
        """Return the finish reason by the tokens alone, or an empty string: its message may be lost."""
        token_ids, sampling = self.choice.output.token_ids, self.choice.spec.sampling
        if token_ids and token_ids[-1] in sampling.stop_token_ids:
            return "stop"
        return "length" if len(token_ids) >= sampling.max_tokens else ""

    def begin_again(self) -> None:
        """Forget a part of the prompt's log-probabilities, because another session reports them from the first on."""
        log = self.choice.output.prompt_log
        if log is not None and not log.is_complete:
            self.choice.output.prompt_log = PromptLog(self.choice.spec.prompt_ids, log.num_wanted)

    def end(self, now_s: float, error_code: str = "") -> None:
        """Tell a watcher of the end."""
        choice = self.choice
        if choice.watcher is not None:
            read_s = self.submitted_s - choice.received_s if choice.received_s else 0.0
            ttft_ms = (self.first_token_s - self.submitted_s) * 1e3 if self.first_token_s else None
            facts = {"error": error_code or None, "ttft_ms": ttft_ms, "read_ms": read_s * 1e3}
            choice.watcher.ended(End(now_s, facts))


def order_of(
    opens: Sequence[OpenChoice], front_id: str, epoch: int, number: int, now_s: float
) -> tuple[list[bytes], FrontOrder]:
    """Return the packed prompts of choices of one HTTP request, and their order; `number` is that of the first message.

    A prompt with several choices is sent once.
    """
    prompts: list[bytes] = []
    places: dict[int, int] = {}
    choices = []
    for each in opens:
        spec, output = each.choice.spec, each.choice.output
        if id(spec.prompt_ids) not in places:
            places[id(spec.prompt_ids)] = len(prompts)
            prompts.append(pack_ids(spec.prompt_ids))
        log = output.prompt_log
        choices.append(
            FrontChoice(
                ticket=each.ticket,
                request_id=spec.request_id,
                index=spec.index,
                prompt=places[id(spec.prompt_ids)],
                seed=spec.sampling.seed,
                max_tokens=spec.sampling.max_tokens,
                outputs=pack_ids(output.token_ids),
                num_prompt_logprobs=0 if log is None or log.is_complete else log.num_wanted,
                prompt_only=spec.prompt_only,
            )
        )
    spec = opens[0].choice.spec
    order = FrontOrder(
        front_id,
        epoch,
        number + len(prompts),
        tuple(choices),
        structs.replace(spec.sampling),
        spec.client,
        spec.client_request_id,
        spec.priority,
        spec.salt,
        max(0.0, now_s - opens[0].submitted_s),
    )
    return prompts, order


REASONS = dict(enumerate(["", *FINISH_REASONS.values()]))


def scored(batch: FrontTokens, token_ids: Sequence[int]) -> list[OutputToken]:
    """Return the tokens of a batch that has log-probabilities."""
    ids, values = unpack_ids(batch.logprob_ids), unpack_floats(batch.logprobs)
    tokens, begin = [], 0
    for token_id, num in zip(token_ids, unpack_ids(batch.num_logprobs), strict=True):
        end = begin + num
        tokens.append(OutputToken(token_id, Logprobs(tuple(ids[begin:end]), tuple(values[begin:end])) if num else None))
        begin = end
    return tokens
