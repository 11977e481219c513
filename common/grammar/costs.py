"""Bounds of the CPU time that texts under one grammar may take.

A process that follows a grammar tells a text that is over a bound, and ends it. What it cannot interrupt, as it is
inside llguidance, the kernel ends with the process, a few times later.
"""

import os
import signal

COMPILE_S = 2.0
"""Of compiling a grammar, which took less than `router.grammar.grammar_main` allows when its request was accepted."""
TOKEN_S = 0.05
"""Of one token beyond `RATE_S`. Ordinary grammars take 0.01 to 0.2 ms, 2 ms where their lexer meets something new."""
RATE_S = 0.005
"""Of each token in the long run."""
SHARED_S = 2.0
"""What all texts under a grammar may take together beyond `RATE_S` a token, before those that do are ended."""
OWN_S = 0.1
"""What a text may take beyond `RATE_S` a token even so."""
PATIENCE = 4
"""The kernel ends the process where a token takes so many times what it may."""
POLITE_S, POLITE_RATE_S = 0.02, 0.002
"""A process that takes more than the first, and the second for each token, lets every other process go first."""
NICENESS = 19
ADVICE = "make the grammar smaller or less ambiguous"


class TextCost:
    """CPU seconds that a text took beyond `RATE_S` a token."""

    def __init__(self) -> None:
        self.excess_s = 0.0


class Costs:
    """CPU time of a process that follows one grammar."""

    def __init__(self) -> None:
        self._left_s = SHARED_S
        self._taken_s, self._polite_s, self.is_polite = 0.0, POLITE_S, False

    def objection(self, text: TextCost, num_tokens: int, spent_s: float) -> str:
        """Count what so many tokens of a text took; returns why it may not go on, or ""."""
        excess_s = spent_s - max(1, num_tokens) * RATE_S
        text.excess_s += excess_s
        self._left_s = min(SHARED_S, self._left_s - excess_s)
        self._be_polite(num_tokens, spent_s)
        if excess_s > TOKEN_S:
            most_ms = round((spent_s - excess_s + TOKEN_S) * 1e3)
            tokens = "a token" if num_tokens <= 1 else f"{num_tokens} tokens"
            return f"following {tokens} took {spent_s * 1e3:.0f} ms of CPU time, at most {most_ms}; {ADVICE}"
        if self._left_s < 0 and text.excess_s > OWN_S:
            return f"texts under this grammar take more than {RATE_S * 1e3:g} ms of CPU time a token; {ADVICE}"
        return ""

    def _be_polite(self, num_tokens: int, spent_s: float) -> None:
        self._taken_s += spent_s
        self._polite_s += max(1, num_tokens) * POLITE_RATE_S
        if self._taken_s > self._polite_s and not self.is_polite:
            self.is_polite = True
            os.nice(NICENESS)


def limit_job(num_tokens: int) -> None:
    """Have the kernel end this process when following so many tokens takes far too long."""
    signal.setitimer(signal.ITIMER_PROF, PATIENCE * (TOKEN_S + max(1, num_tokens) * RATE_S))


def limit_compiling() -> None:
    """Have the kernel end this process when compiling its grammar takes too long."""
    signal.setitimer(signal.ITIMER_PROF, COMPILE_S)


def end_limit() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0.0)
