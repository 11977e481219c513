"""Decode batches with different contexts, written as `64x1024+1x32768` or drawn from a heavy-tailed distribution."""

import random
import re
from dataclasses import dataclass
from itertools import chain

from deploy.bench.workload import SIGMA

TERM = re.compile(r"(\d+)x(\d+)")
DRAWN = re.compile(r"(\d+)~(\d+)")


@dataclass(frozen=True, slots=True)
class ContextMix:
    """Sequences of a decode batch by context length, in tokens."""

    name: str
    contexts: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.contexts)

    def evened(self) -> "ContextMix":
        """Return a mix of equally many sequences of a single length, with equally many keys in all."""
        num_rows = len(self.contexts)
        return uniform(num_rows, self.num_tokens // num_rows)


def uniform(num_rows: int, context: int) -> ContextMix:
    return ContextMix(f"{num_rows} sequences at {context} tokens", (context,) * num_rows)


def parse_mix(text: str, longest: int = 131_072) -> ContextMix:
    """Parse terms `COUNTxTOKENS` joined by `+`, or `COUNT~MEAN`, drawn log-normally and none above `longest`.

    Raises ValueError for anything else.
    """
    if drawn := DRAWN.fullmatch(text):
        count, mean = map(int, drawn.groups())
        return ContextMix(f"{count} sequences, log-normal about {mean} tokens", _drawn(count, mean, longest))
    terms = [TERM.fullmatch(term) for term in text.split("+")]
    counted = [(int(term[1]), int(term[2])) for term in terms if term]
    if len(counted) < len(terms) or not sum(count for count, _ in counted):
        raise ValueError(f"{text!r}: a mix is COUNTxTOKENS, joined by +, or COUNT~MEAN")
    return ContextMix(text, tuple(chain.from_iterable([tokens] * count for count, tokens in counted)))


def _drawn(count: int, mean: int, longest: int) -> tuple[int, ...]:
    rng = random.Random(f"{count} contexts about {mean}")
    weights = [rng.lognormvariate(0.0, SIGMA) for _ in range(count)]
    return tuple(min(max(round(weight * mean * count / sum(weights)), 1), longest) for weight in weights)
