"""What a response tells of the tokens of its prompts, in the shapes that were asked for."""

from typing import NamedTuple

from router.dispatch.request_state import Completion
from router.requests.completion_api import ResponseOptions
from router.text.logprobs import TokenStrings
from router.text.tokenizer import Tokenizer


class PromptParts(NamedTuple):
    """Of one choice, as JSON; empty where it was not asked for."""

    echoed: dict[str, str]  # items of the lists in `logprobs` that stand before those of the outputs
    told: str


NOTHING = PromptParts({}, "")


class PromptShaper:
    """For all choices of one HTTP request; names of tokens are found once for all."""

    def __init__(self, tokenizer: Tokenizer, options: ResponseOptions, strings: TokenStrings) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._strings = strings

    async def parts(self, completion: Completion) -> PromptParts:
        """Of a choice whose prompt is computed; lets others have their turns meanwhile."""
        log, options = completion.prompt_log, self._options
        if log is None:
            return NOTHING
        echoed, told = NOTHING
        if num_echoed := options.num_echoed_logprobs:
            # What a client sent as text may have special tokens around it that its echo has not.
            is_decoded = self._tokenizer.decode_prompt(completion.prompt_ids) == completion.echo
            decode = self._tokenizer.decode_all if is_decoded else self._tokenizer.decode
            echoed = await log.echoed(self._strings, decode, num_echoed)
        if options.num_prompt_logprobs:
            told = await log.told(self._strings, options.num_prompt_logprobs)
        return PromptParts(echoed, told)
