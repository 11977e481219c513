"""Prompts with beginnings in common: shared prefixes, and conversations that grow turn by turn."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deploy.bench.workload import Lengths, Prompt, random_prompts


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Prefixes of equal length, dealt out in turn or drawn by Zipf's law.

    With `zipf` the k-th prefix is drawn in proportion to 1 / k ** zipf.
    """

    count: int
    num_tokens: int
    zipf: float | None = None

    @staticmethod
    def parse(text: str) -> "Prefixes":
        """Parse `8x4096`: eight prefixes of 4,096 tokens; raises ValueError for anything else."""
        count, _, num_tokens = text.partition("x")
        if not (count.isdecimal() and num_tokens.isdecimal() and min(int(count), int(num_tokens)) > 0):
            raise ValueError(f"{text!r}: COUNTxTOKENS, for example 8x4096")
        return Prefixes(int(count), int(num_tokens))

    def drawn(self, vocabulary: Sequence[int], seed: str) -> list[Prompt]:
        """Return each prefix as a prompt for a single token."""
        lengths = Lengths.fixed(self.num_tokens, 1)
        return random_prompts(self.count, lengths, vocabulary, f"{seed}, prefixes")

    def before(self, prompts: Sequence[Prompt], vocabulary: Sequence[int], seed: str) -> list[Prompt]:
        """Put a prefix before each of the prompts, which must be token ids."""
        prefixes, order = self.drawn(vocabulary, seed), self.order(len(prompts), seed)
        return [prompt.after(prefixes[k].token_ids) for k, prompt in zip(order, prompts, strict=True)]

    def order(self, num_prompts: int, seed: str) -> list[int]:
        """Return the index of each prompt's prefix."""
        if self.zipf is None:
            return [number % self.count for number in range(num_prompts)]
        weights = [1 / k**self.zipf for k in range(1, self.count + 1)]
        return random.Random(f"{seed}, order").choices(range(self.count), weights, k=num_prompts)

    def __str__(self) -> str:
        return f"{self.count}x{self.num_tokens}" + ("" if self.zipf is None else f" (Zipf {self.zipf:g})")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A user's side of a conversation: the new tokens of each turn, and the seconds of thinking before."""

    turns: list[Prompt]
    thinks_s: list[float]


def conversations(openings: Sequence[Prompt], later: Sequence[Prompt], think_s: float, seed: str) -> list[Conversation]:
    """Make a conversation for each opening, dealing out the later turns evenly; `think_s` is a mean."""
    rng = random.Random(f"{seed}, thinking")
    talks = []
    for user, opening in enumerate(openings):
        turns = [replace(turn, returns_ids=True) for turn in (opening, *later[user :: len(openings)])]
        thinks_s = [rng.expovariate(1 / think_s) if think_s else 0.0 for _ in turns[1:]]
        talks.append(Conversation(turns, [0.0, *thinks_s]))
    return talks
