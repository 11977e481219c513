"""One HTTP request at work: its prompts as tokens and a completion for each choice."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from router.detokenizer import TextStream
from router.dispatcher import Dispatcher
from router.openai_api import CompletionRequest, choice_seed
from router.prompts import fit_max_tokens
from router.request_state import Completion, Mailbox
from router.responses import head_of, usage_of
from router.service import Service


@dataclass(frozen=True, slots=True)
class Job:
    """Completions in the order of their choices: prompt by prompt, n for each."""

    head: dict[str, Any]
    num_prompt_tokens: int
    completions: list[Completion]
    mailbox: Mailbox

    @property
    def usage(self) -> dict[str, int]:
        return usage_of(self.num_prompt_tokens, sum(len(completion.outputs) for completion in self.completions))


def make_job(service: Service, request: CompletionRequest, response_id: str) -> Job:
    """Check the lengths of tokenized prompts; raises RequestError for one that does not fit, or when all do not now."""
    num_prompt_tokens = sum(map(len, request.prompts))
    service.dispatcher.admit(len(request.prompts) * request.n, request.n * num_prompt_tokens)
    mailbox = Mailbox()
    completions: list[Completion] = []
    for prompt_ids in request.prompts:
        assert not isinstance(prompt_ids, str), "the reader leaves tokens"
        max_tokens = fit_max_tokens(len(prompt_ids), request.sampling.max_tokens, service.max_model_len)
        for choice in range(request.n):
            seed = choice_seed(request.sampling.seed, choice)
            completion = Completion(
                request_id=f"{response_id}-{len(completions)}",
                index=len(completions),
                prompt_ids=prompt_ids,
                sampling=replace(request.sampling, max_tokens=max_tokens, seed=seed),
                text=TextStream(service.tokenizer.decode, request.stops),
                mailbox=mailbox,
                client=request.client,
                priority=request.priority,
            )
            completions.append(completion)
    head = head_of(response_id, int(time.time()), service.tokenizer.info.name)
    return Job(head, num_prompt_tokens, completions, mailbox)


@contextmanager
def submitted(dispatcher: Dispatcher, job: Job) -> Iterator[None]:
    """Run the completions; whatever ends the block aborts those that are not finished."""
    dispatcher.submit(job.completions)
    try:
        yield
    finally:
        dispatcher.abort(*job.completions)
