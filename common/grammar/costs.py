"""Bounds on the CPU time of texts under a grammar.

A process that follows a grammar ends a text over a bound, with a reason. The process cannot interrupt llguidance, so
the kernel ends the whole process at a few times the bound.
"""

import os
import signal

COMPILE_S = 2.0
"""CPU seconds to compile a grammar; `router.grammar.grammar_main` bounded the time before accepting the request."""
TOKEN_S = 0.05
"""CPU seconds of a token beyond `RATE_S`. Ordinary grammars take 0.01 to 0.2 ms; a new lexer state takes 2 ms."""
RATE_S = 0.005
"""CPU seconds a token in the long run."""
SHARED_S = 2.0
"""CPU seconds of all texts under a grammar beyond `RATE_S` a token, before expensive texts are ended."""
OWN_S = 0.1
"""CPU seconds of a text beyond `RATE_S` a token, allowed even then."""
PATIENCE = 4
"""The kernel ends the process at `PATIENCE` times a job's bound."""
UNNICED_S, UNNICED_RATE_S = 0.02, 0.002
"""CPU seconds, fixed and per token; above the sum a process lowers its priority by `NICENESS`."""
NICENESS = 19
ADVICE = "make the grammar smaller or less ambiguous"


class TextCost:
    """CPU seconds of a text beyond `RATE_S` a token."""

    def __init__(self) -> None:
        self.excess_s = 0.0


class Costs:
    """CPU time of a process under a grammar."""

    def __init__(self) -> None:
        self._left_s = SHARED_S
        self._taken_s, self._unniced_s, self.is_niced = 0.0, UNNICED_S, False

    def objection(self, text: TextCost, num_tokens: int, spent_s: float) -> str:
        """Count the CPU time of a text's tokens; return the reason to end the text, or ""."""
        excess_s = spent_s - max(1, num_tokens) * RATE_S
        text.excess_s += excess_s
        self._left_s = min(SHARED_S, self._left_s - excess_s)
        self._lower_priority(num_tokens, spent_s)
        if excess_s > TOKEN_S:
            most_ms = round((spent_s - excess_s + TOKEN_S) * 1e3)
            tokens = "a token" if num_tokens <= 1 else f"{num_tokens} tokens"
            return f"following {tokens} took {spent_s * 1e3:.0f} ms of CPU time, at most {most_ms}; {ADVICE}"
        if self._left_s < 0 and text.excess_s > OWN_S:
            return f"texts under this grammar take more than {RATE_S * 1e3:g} ms of CPU time a token; {ADVICE}"
        return ""

    def _lower_priority(self, num_tokens: int, spent_s: float) -> None:
        self._taken_s += spent_s
        self._unniced_s += max(1, num_tokens) * UNNICED_RATE_S
        if self._taken_s > self._unniced_s and not self.is_niced:
            self.is_niced = True
            os.nice(NICENESS)


def limit_job(num_tokens: int) -> None:
    """Let the kernel end this process if following `num_tokens` tokens takes far too long."""
    signal.setitimer(signal.ITIMER_PROF, PATIENCE * (TOKEN_S + max(1, num_tokens) * RATE_S))


def limit_compiling() -> None:
    """Let the kernel end this process if compiling the grammar takes too long."""
    signal.setitimer(signal.ITIMER_PROF, COMPILE_S)


def end_limit() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0.0)
