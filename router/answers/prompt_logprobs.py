"""Log-probabilities of prompt tokens in a response, in the requested shapes."""

from typing import NamedTuple

from router.dispatch.request_state import Completion
from router.requests.completion_api import ResponseOptions
from router.text.logprobs import TokenStrings
from router.text.tokenizer import Tokenizer


class PromptParts(NamedTuple):
    """Prompt log-probabilities of a choice, as JSON; empty if not requested."""

    echoed: dict[str, str]  # items of each list in `logprobs`, before the outputs' items
    told: str  # the field `prompt_logprobs`


NOTHING = PromptParts({}, "")


class PromptShaper:
    """Shaper of prompt log-probabilities for all choices of an HTTP request; finds token names once."""

    def __init__(self, tokenizer: Tokenizer, options: ResponseOptions, strings: TokenStrings) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._strings = strings

    async def parts(self, completion: Completion) -> PromptParts:
        """Return the parts of a choice with a computed prompt; gives way to other tasks meanwhile."""
        log, options = completion.output.prompt_log, self._options
        if log is None:
            return NOTHING
        echoed, told = NOTHING
        if num_echoed := options.num_echoed_logprobs:
            # A prompt sent as text may have special tokens around it, but its echo has none.
            is_decoded = self._tokenizer.decode_prompt(completion.spec.prompt_ids) == completion.spec.echo
            decode = self._tokenizer.decode_all if is_decoded else self._tokenizer.decode
            echoed = await log.echoed(self._strings, decode, num_echoed)
        if options.num_prompt_logprobs:
            told = await log.told(self._strings, options.num_prompt_logprobs)
        return PromptParts(echoed, told)
