"""What a round of `serve` sends, and what that is called: the meaning of its flags."""

import argparse
from collections.abc import Sequence

from deploy.bench.prefixes import Conversation, conversations
from deploy.bench.words import Words
from deploy.bench.workload import Lengths, Prompt, file_prompts, poisson_arrivals, random_prompts, structured

CROWD_TOKENS = 4096
"""Of a prompt that is there to take room, if a prefix has as many: what is longer a model might not take."""


class Load:
    """Everything follows from the flags and the number of the round; raises ValueError for an unusable tokenizer."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._words = Words(args.tokenizer) if args.tokenizer else None
        self._vocabulary: Sequence[int] = self._words.ids if self._words else range(args.vocab_size)
        self.name = args.workload or _name(args)

    def prompts(self, number: int) -> list[Prompt]:
        """Of a round without conversations."""
        return self._prompts(self._args.num_prompts, self._round(number))

    def warm_up(self) -> list[Prompt]:
        """What is sent before all rounds."""
        return self._prompts(self._args.warmup, self._seed("warm-up"))

    def primers(self, number: int) -> list[Prompt]:
        """The prefixes of a round by themselves."""
        if not self._args.primed:
            return []
        return self._as_sent(self._args.prefixes.drawn(self._vocabulary, self._round(number)))

    def crowd(self, number: int) -> list[Prompt]:
        """Others, for whom a server needs the room of those prefixes."""
        if not self._args.crowd_out:
            return []
        num_tokens = min(CROWD_TOKENS, self._args.prefixes.num_tokens)
        num_prompts, lengths = -(-self._args.crowd_out // num_tokens), Lengths.fixed(num_tokens, 1)
        return self._as_sent(random_prompts(num_prompts, lengths, self._vocabulary, f"{self._round(number)}, crowd"))

    def conversations(self, number: int) -> list[Conversation]:
        """Of a round of `--users`."""
        args, seed = self._args, self._round(number)
        openings = self._prompts(args.users, seed)
        later = random_prompts(args.users * (args.turns - 1), _lengths(args), self._vocabulary, f"{seed}, later turns")
        return conversations(openings, later, args.think_s, seed)

    def arrivals_s(self, number: int, num_prompts: int) -> list[float]:
        """When each prompt is sent, in seconds after the round began."""
        if not self._args.rate:
            return [0.0] * num_prompts
        return poisson_arrivals(num_prompts, self._args.rate, self._seed(f"arrivals of round {number}"))

    def prefixes(self, number: int, num_prompts: int) -> list[int]:
        """Which of its prefixes each prompt of a round begins with; of a load that has some."""
        order: list[int] = self._args.prefixes.order(num_prompts, self._round(number))
        return order

    def beside(self, number: int, last_s: float) -> tuple[list[Prompt], list[float]]:
        """The second stream: prompts, and arrivals up to the last of the first."""
        stream, seed = self._args.beside, self._seed(f"beside in round {number}")
        if stream is None:
            return [], []
        drawn_s = poisson_arrivals(int(2 * stream.rate * last_s) + 1, stream.rate, seed)
        arrivals_s = [s for s in drawn_s if s <= last_s]
        return random_prompts(len(arrivals_s), stream.lengths, self._vocabulary, seed), arrivals_s

    def _prompts(self, num_prompts: int, seed: str) -> list[Prompt]:
        args, lengths = self._args, _lengths(self._args)
        if args.prompt_file:
            return structured(file_prompts(args.prompt_file, num_prompts, lengths, seed), args.structured)
        prompts = random_prompts(num_prompts, lengths, self._vocabulary, seed)
        if args.prefixes:
            prompts = args.prefixes.before(prompts, self._vocabulary, seed)
        return structured(self._as_sent(prompts), args.structured)

    def _as_sent(self, prompts: list[Prompt]) -> list[Prompt]:
        return self._words.written(prompts) if self._words else prompts

    def _round(self, number: int) -> str:
        return self._seed(f"round {number}")

    def _seed(self, part: str) -> str:
        """Every workload has prompts of its own, so that no server finds them in its prefix cache after another one."""
        return f"{self._args.seed}, {self.name}, {part}"


def _name(args: argparse.Namespace) -> str:
    """Mode, lengths and number of requests in words."""
    name = f"{_mode(args)}, {_source(args)}/{_lengths(args).outputs}, {args.num_prompts * args.rounds} requests"
    name += f", {args.structured:.0%} held to a schema" if args.structured else ""
    return f"{name}, beside {args.beside}" if args.beside else name


def _mode(args: argparse.Namespace) -> str:
    if args.users:
        thinking = f" after {args.think_s:g} s" if args.think_s else ""
        return f"{args.users} users x {args.turns} turns{thinking}"
    return f"{args.rate:g} req/s" if args.rate else f"concurrency {args.concurrency}" if args.concurrency else "at once"


def _source(args: argparse.Namespace) -> str:
    """What prompts are made of."""
    if args.prompt_file:
        return str(args.prompt_file.name)
    primed = f"{'crowded out, ' if args.crowd_out else ''}primed " if args.primed else ""
    prefixes = f"{primed}{args.prefixes}+" if args.prefixes else ""
    return f"{'text of ' if args.tokenizer else ''}{prefixes}{_lengths(args).inputs}"


def _lengths(args: argparse.Namespace) -> Lengths:
    fixed = Lengths.fixed(args.input_len, args.output_len)
    return Lengths(args.input_range or fixed.inputs, args.output_range or fixed.outputs)
