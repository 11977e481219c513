"""Completions for tests, as the router makes them of requests."""

from collections.abc import Sequence
from typing import Any

from common.wire.values.sampling_params import SamplingParams
from router.dispatch.completion.choice import Choice, Delivery, Mailbox
from router.dispatch.completion.state import Completion, CompletionOutput, CompletionSpec
from router.text.detokenizer import TextStream
from router.text.prompt_log import PromptLog


def make_completion(
    request_id: str = "cmpl-1-0",
    prompt_ids: Sequence[int] = (1,),
    sampling: SamplingParams | None = None,
    text: TextStream | None = None,
    *,
    num_prompt_logprobs: int = 0,
    **fields: Any,
) -> Completion:
    """Make a completion before its submission; without `text`, no token shows. `fields`: of `CompletionSpec`."""
    spec = CompletionSpec(request_id, fields.pop("index", 0), prompt_ids, sampling or SamplingParams(), **fields)
    log = PromptLog(prompt_ids, num_prompt_logprobs) if num_prompt_logprobs else None
    output = CompletionOutput(prompt_log=log)
    return Completion(spec, output, Choice(spec, output, text or TextStream(lambda _: ""), Mailbox()))


def choice_of(completion: Completion) -> Choice:
    """Return the choice to which the tokens of a completion go."""
    assert isinstance(completion.outlet, Choice)
    return completion.outlet


def deliveries_of(completion: Completion) -> list[Delivery]:
    """Return what was delivered so far."""
    return choice_of(completion).mailbox._deliveries
