"""Completions of a front's order."""

from array import array
from collections.abc import Callable, Sequence

from msgspec import structs

from common.base.errors import RequestError
from common.wire.messages.fronts import FrontChoice, FrontOrder
from common.wire.values.packing import unpack_ids
from router.dispatch.completion.attempt import Attempt
from router.dispatch.completion.state import Completion, CompletionOutput, CompletionSpec, Outlet
from router.text.prompt_log import PromptLog

MakeOutlet = Callable[[int, CompletionOutput], Outlet]
"""Makes the outlet of a ticket's completion."""


def completions_of(
    order: FrontOrder, prompts: Sequence["array[int]"], vocab_size: int, make_outlet: MakeOutlet
) -> dict[int, Completion]:
    """Make an order's completions by ticket; raise RequestError for a prompt or outputs not of the model."""
    if any(max(prompt) >= vocab_size for prompt in prompts):
        raise RequestError("the front sent token ids outside of the vocabulary", code="internal_error", status=500)
    made: dict[int, Completion] = {}
    for choice in order.choices:
        if choice.prompt >= len(prompts) or choice.ticket in made:
            raise RequestError("the front sent an order without its prompts", code="internal_error", status=500)
        made[choice.ticket] = _completion(order, choice, prompts[choice.prompt], make_outlet)
    return made


def _completion(
    order: FrontOrder, choice: FrontChoice, prompt_ids: "array[int]", make_outlet: MakeOutlet
) -> Completion:
    spec = CompletionSpec(
        request_id=choice.request_id,
        index=choice.index,
        prompt_ids=prompt_ids,
        sampling=structs.replace(order.sampling, seed=choice.seed, max_tokens=choice.max_tokens),
        client=order.client,
        client_request_id=order.client_request_id,
        priority=order.priority,
        salt=order.salt,
        prompt_only=choice.prompt_only,
    )
    num_scores = choice.num_prompt_logprobs
    log = PromptLog(prompt_ids, num_scores) if num_scores else None
    output = CompletionOutput(unpack_ids(choice.outputs), prompt_log=log)
    attempt = Attempt(first_index=len(output.token_ids))
    return Completion(spec, output, make_outlet(choice.ticket, output), attempt=attempt)
