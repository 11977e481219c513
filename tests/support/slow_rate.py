"""For tests of what comes from elsewhere if that is faster than computing it."""

from common.serving.prompts.rate import PromptRate


class SlowRate(PromptRate):
    """Computing takes a millisecond a token, whatever steps show."""

    @property
    def token_us(self) -> float:
        return 1000.0
