"""An HTTP request at work: tokenized prompts, and `n` choices for each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat

from msgspec import structs

from common.base.json_file import JsonObject
from router.answers.completion_bodies import PromptShaper, usage_of
from router.base.shapes import Usage
from router.dispatch.completion.choice import Choice, Mailbox
from router.dispatch.completion.journey import Watch, no_watch
from router.dispatch.completion.state import CompletionOutput, CompletionSpec
from router.http_service import HttpService, Order
from router.requests.completion_api import CompletionRequest, ResponseOptions, TextOptions, choice_seed
from router.text.detokenizer import Decode, TextStream
from router.text.logprobs import LogprobLog, TokenStrings
from router.text.prompt_log import PromptLog
from router.text.prompts import fit_max_tokens
from router.text.stop_strings import StopAutomaton, StopMatcher
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Job:
    """Choices in the order of the response: prompt by prompt, `num_choices` for each."""

    head: JsonObject
    options: ResponseOptions
    num_prompt_tokens: int
    num_choices: int  # for each prompt
    choices: list[Choice]
    mailbox: Mailbox
    shaper: PromptShaper

    @property
    def usage(self) -> Usage:
        num_outputs = sum(len(choice.output.token_ids) for choice in self.choices)
        num_cached = sum(choice.output.num_cached for choice in self.choices[:: self.num_choices])
        return usage_of(self.num_prompt_tokens, num_outputs, num_cached)


def make_job(
    service: HttpService,
    request: CompletionRequest,
    head: JsonObject,
    client_request_id: str = "",
    received_s: float = 0.0,
    watch: Watch = no_watch,
) -> Job:
    """Check prompt lengths and make choices; raise RequestError for a misfit or an overload.

    Args:
        head: fields shared by all parts of the response, with the id.
        received_s: time of the request's first byte; 0 if unknown.
        watch: returns a watcher for each choice.
    """
    num_prompt_tokens = sum(map(len, request.prompts))
    service.admit(len(request.prompts) * request.n, request.n * num_prompt_tokens)
    mailbox = Mailbox()
    text_stream = _text_streams(service.tokenizer, request.text, request.sampling.min_tokens)
    strings = TokenStrings(service.tokenizer, as_ids=request.response.tokens_as_ids)
    logprob_log = _logprob_logs(service.tokenizer, request, strings)
    num_scores = request.response.num_scores
    choices: list[Choice] = []
    for prompt_ids, echo in zip(request.prompts, request.echoes or repeat(""), strict=False):
        assert not isinstance(prompt_ids, str), "the reader leaves tokens"
        max_tokens = fit_max_tokens(
            len(prompt_ids), request.max_tokens, service.max_model_len, request.usual_max_tokens
        )
        for number in range(request.n):
            seed = choice_seed(request.sampling.seed, number)
            spec = CompletionSpec(
                request_id=f"{head['id']}-{len(choices)}",
                index=len(choices),
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
            output = CompletionOutput(prompt_log=PromptLog(prompt_ids, num_scores) if num_scores else None)
            watcher = watch(len(choices))
            choice = Choice(spec, output, text_stream(echo), mailbox, logprob_log(echo), received_s, watcher)
            choices.append(choice)
            if spec.prompt_only and not output.lacks_prompt_logprobs:
                choice.end_with_prompt()
    shaper = PromptShaper(service.tokenizer, request.response, strings)
    return Job(head, request.response, num_prompt_tokens, request.n, choices, mailbox, shaper)


@contextmanager
def submitted(order: Order) -> Iterator[None]:
    """Run the choices of an order; the end of the block aborts unfinished choices."""
    order.submit()
    try:
        yield
    finally:
        order.abort()


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
