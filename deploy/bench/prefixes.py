"""Prompts whose beginnings other prompts have, too: shared prefixes, and conversations that grow turn by turn."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deploy.bench.workload import Lengths, Prompt, random_prompts


@dataclass(frozen=True, slots=True)
class Prefixes:
    """So many of so many tokens: dealt out in turn or, by Zipf's law, the k-th drawn as often as 1 / k ** zipf says."""

    count: int
    num_tokens: int
    zipf: float | None = None

    @staticmethod
    def parse(text: str) -> "Prefixes":
        """From `8x4096`, eight of 4,096 tokens; raises ValueError for anything else."""
        count, _, num_tokens = text.partition("x")
        if not (count.isdecimal() and num_tokens.isdecimal() and min(int(count), int(num_tokens)) > 0):
            raise ValueError(f"{text!r}: COUNTxTOKENS, for example 8x4096")
        return Prefixes(int(count), int(num_tokens))

    def drawn(self, vocabulary: Sequence[int], seed: str) -> list[Prompt]:
        """Each of them as a prompt for one token."""
        lengths = Lengths.fixed(self.num_tokens, 1)
        return random_prompts(self.count, lengths, vocabulary, f"{seed}, prefixes")

    def before(self, prompts: Sequence[Prompt], vocabulary: Sequence[int], seed: str) -> list[Prompt]:
        """These prompts of token ids, each behind one of the prefixes."""
        prefixes, order = self.drawn(vocabulary, seed), self.order(len(prompts), seed)
        return [prompt.after(prefixes[k].token_ids) for k, prompt in zip(order, prompts, strict=True)]

    def order(self, num_prompts: int, seed: str) -> list[int]:
        """Which prefix each prompt has."""
        if self.zipf is None:
            return [number % self.count for number in range(num_prompts)]
        weights = [1 / k**self.zipf for k in range(1, self.count + 1)]
        return random.Random(f"{seed}, order").choices(range(self.count), weights, k=num_prompts)

    def __str__(self) -> str:
        return f"{self.count}x{self.num_tokens}" + ("" if self.zipf is None else f" (Zipf {self.zipf:g})")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one user says: the new tokens of each turn, and for how many seconds he thinks before."""

    turns: list[Prompt]
    thinks_s: list[float]


def conversations(openings: Sequence[Prompt], later: Sequence[Prompt], think_s: float, seed: str) -> list[Conversation]:
    """Of as many users as there are openings, whose later turns are dealt out evenly; `think_s` is a mean."""
    rng = random.Random(f"{seed}, thinking")
    talks = []
    for user, opening in enumerate(openings):
        turns = [replace(turn, returns_ids=True) for turn in (opening, *later[user :: len(openings)])]
        thinks_s = [rng.expovariate(1 / think_s) if think_s else 0.0 for _ in turns[1:]]
        talks.append(Conversation(turns, [0.0, *thinks_s]))
    return talks
