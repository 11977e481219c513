"""An HTTP request at work: tokenized prompts and a completion for each choice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat

from msgspec import structs

from common.base.json_file import JsonObject
from common.wire.messages.worker import FinishReason
from router.answers.completion_bodies import PromptShaper, usage_of
from router.base.shapes import Usage
from router.dispatch.completion.journey import Journey, Watch, no_watch
from router.dispatch.completion.state import (
    FINISH_REASONS,
    Completion,
    CompletionOutput,
    CompletionSpec,
    CompletionTimes,
    Delivery,
    Mailbox,
    State,
)
from router.dispatch.dispatcher import Dispatcher
from router.requests.completion_api import CompletionRequest, ResponseOptions, TextOptions, choice_seed
from router.service import Service
from router.text.detokenizer import Decode, TextStream
from router.text.logprobs import LogprobLog, TokenStrings
from router.text.prompt_log import PromptLog
from router.text.prompts import fit_max_tokens
from router.text.stop_strings import StopAutomaton, StopMatcher
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Job:
    """Completions in the order of choices: prompt by prompt, `num_choices` for each."""

    head: JsonObject
    options: ResponseOptions
    num_prompt_tokens: int
    num_choices: int  # for each prompt
    completions: list[Completion]
    mailbox: Mailbox
    shaper: PromptShaper

    @property
    def usage(self) -> Usage:
        num_outputs = sum(len(completion.output.token_ids) for completion in self.completions)
        num_cached = sum(completion.output.num_cached for completion in self.completions[:: self.num_choices])
        return usage_of(self.num_prompt_tokens, num_outputs, num_cached)


def make_job(
    service: Service,
    request: CompletionRequest,
    head: JsonObject,
    client_request_id: str = "",
    received_s: float = 0.0,
    watch: Watch = no_watch,
) -> Job:
    """Check prompt lengths and make completions; raise RequestError for a misfit or an overload.

    Args:
        head: fields shared by all parts of the response, with the id.
        received_s: time of the request's first byte; 0 if unknown.
        watch: returns a watcher for each choice.
    """
    num_prompt_tokens = sum(map(len, request.prompts))
    service.dispatcher.admit(len(request.prompts) * request.n, request.n * num_prompt_tokens)
    mailbox = Mailbox()
    text_stream = _text_streams(service.tokenizer, request.text, request.sampling.min_tokens)
    strings = TokenStrings(service.tokenizer, as_ids=request.response.tokens_as_ids)
    logprob_log = _logprob_logs(service.tokenizer, request, strings)
    num_scores = request.response.num_scores
    completions: list[Completion] = []
    for prompt_ids, echo in zip(request.prompts, request.echoes or repeat(""), strict=False):
        assert not isinstance(prompt_ids, str), "the reader leaves tokens"
        max_tokens = fit_max_tokens(
            len(prompt_ids), request.max_tokens, service.max_model_len, request.usual_max_tokens
        )
        for choice in range(request.n):
            seed = choice_seed(request.sampling.seed, choice)
            watcher = watch(len(completions))
            spec = CompletionSpec(
                request_id=f"{head['id']}-{len(completions)}",
                index=len(completions),
                prompt_ids=prompt_ids,
                sampling=structs.replace(request.sampling, max_tokens=max(1, max_tokens), seed=seed),
                client=request.client,
                client_request_id=client_request_id,
                priority=request.priority,
                salt=request.salt,
                stop_token_ids=request.text.stop_token_ids,
                include_stop=request.text.include_stop,
                echo=echo,
                prompt_only=max_tokens == 0,
            )
            prompt_log = PromptLog(prompt_ids, num_scores) if num_scores else None
            completion = Completion(
                spec,
                CompletionOutput(text_stream(echo), logprobs=logprob_log(echo), prompt_log=prompt_log),
                mailbox,
                CompletionTimes(received_s=received_s),
                journey=Journey(watcher) if watcher is not None else None,
            )
            completions.append(completion)
            if spec.prompt_only and not completion.output.lacks_prompt_logprobs:
                _end_with_the_prompt(completion)
    shaper = PromptShaper(service.tokenizer, request.response, strings)
    return Job(head, request.response, num_prompt_tokens, request.n, completions, mailbox, shaper)


@contextmanager
def submitted(dispatcher: Dispatcher, job: Job) -> Iterator[None]:
    """Run the completions; the end of the block aborts unfinished completions."""
    dispatcher.submit([completion for completion in job.completions if not completion.is_terminal])
    try:
        yield
    finally:
        dispatcher.abort(*job.completions)


def _end_with_the_prompt(completion: Completion) -> None:
    """Finish a completion of a bare prompt, because nothing has to be computed."""
    output = completion.output
    output.finish_reason = FINISH_REASONS[FinishReason.LENGTH]
    completion.move_to(State.FINISHED)
    completion.mailbox.put(Delivery(completion.spec.index, output.text.flush(), 0, output.finish_reason))


def _text_streams(tokenizer: Tokenizer, options: TextOptions, min_tokens: int) -> Callable[[str], TextStream]:
    """Return a maker of each choice's text, given the text before; shared parts are made once."""
    decode = _decode(tokenizer, options)
    piece = tokenizer.pieces_of(decode)
    if not options.stops:
        return lambda prefix: TextStream(decode, prefix=prefix, piece=piece)
    automaton = StopAutomaton(options.stops)
    include = options.include_stop
    return lambda prefix: TextStream(decode, StopMatcher(automaton, include=include), prefix, min_tokens, piece)


def _decode(tokenizer: Tokenizer, options: TextOptions) -> Decode:
    return tokenizer.decode_with(options.kept) if options.skip_special_tokens else tokenizer.decode_all


def _logprob_logs(
    tokenizer: Tokenizer, request: CompletionRequest, strings: TokenStrings
) -> Callable[[str], LogprobLog | None]:
    """Return a maker of each choice's log, given the text before; gives None if not requested."""
    if not request.sampling.num_logprobs:
        return lambda prefix: None
    decode = _decode(tokenizer, request.text)
    piece = tokenizer.pieces_of(decode)
    return lambda prefix: LogprobLog(strings, decode, len(prefix), piece)
