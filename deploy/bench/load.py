"""The requests of each round of `serve`, and the workload's name, by the flags."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from deploy.bench.prefixes import Conversation, conversations
from deploy.bench.words import Words
from deploy.bench.workload import Lengths, Prompt, Sampling, arrivals_at, file_prompts, random_prompts, structured

CROWD_TOKENS = 4096
"""Length of a crowding prompt at most; a model might refuse longer prompts."""


class Load:
    """The load given by the flags and the round's number; raises ValueError for an unusable tokenizer."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._words = Words(args.tokenizer) if args.tokenizer else None
        self._vocabulary: Sequence[int] = self._words.ids if self._words else range(args.vocab_size)
        self.name = args.workload or _name(args)

    def prompts(self, number: int) -> list[Prompt]:
        """Return the prompts of a round without conversations."""
        return self._prompts(self._args.num_prompts, self._seed(f"round {number}"))

    def warm_up(self) -> list[Prompt]:
        """Return the prompts sent before all rounds."""
        return self._prompts(self._args.warmup, self._seed("warm-up"))

    def primers(self, number: int) -> list[Prompt]:
        """Return the prefixes of a round as prompts."""
        if not self._args.primed:
            return []
        return self._as_sent(self._args.prefixes.drawn(self._vocabulary, self._seed(f"round {number}")))

    def crowd(self, number: int) -> list[Prompt]:
        """Return prompts that push the round's prefixes out of a server's cache."""
        if not self._args.crowd_out:
            return []
        num_tokens = min(CROWD_TOKENS, self._args.prefixes.num_tokens)
        num_prompts, lengths = -(-self._args.crowd_out // num_tokens), Lengths.fixed(num_tokens, 1)
        seed = self._seed(f"round {number}, crowd")
        return self._as_sent(random_prompts(num_prompts, lengths, self._vocabulary, seed))

    def conversations(self, number: int) -> list[Conversation]:
        """Return the conversations of a round of `--users`."""
        args, seed = self._args, self._seed(f"round {number}")
        openings = self._prompts(args.users, seed)
        later = random_prompts(args.users * (args.turns - 1), _lengths(args), self._vocabulary, f"{seed}, later turns")
        return conversations(openings, self._asked(later), args.think_s, seed)

    def arrivals_s(self, number: int, num_prompts: int) -> list[float]:
        """Return each prompt's time, in seconds after the round's start."""
        if not self._args.rate:
            return [0.0] * num_prompts
        seed = self._seed(f"arrivals of round {number}")
        return arrivals_at(num_prompts, self._args.rate, seed, self._args.burstiness)

    def prefixes(self, number: int, num_prompts: int) -> list[int]:
        """Return the index of each prompt's prefix in a round; the load must have prefixes."""
        order: list[int] = self._args.prefixes.order(num_prompts, self._seed(f"round {number}"))
        return order

    def beside(self, number: int, last_s: float) -> tuple[list[Prompt], list[float]]:
        """Return the second stream: prompts, and arrivals up to the last of the first stream."""
        stream, seed = self._args.beside, self._seed(f"beside in round {number}")
        if stream is None:
            return [], []
        drawn_s = arrivals_at(int(2 * stream.rate * last_s) + 1, stream.rate, seed)
        arrivals_s = [s for s in drawn_s if s <= last_s]
        return self._asked(random_prompts(len(arrivals_s), stream.lengths, self._vocabulary, seed)), arrivals_s

    def _prompts(self, num_prompts: int, seed: str) -> list[Prompt]:
        args, lengths = self._args, _lengths(self._args)
        if args.prompt_file:
            return self._asked(structured(file_prompts(args.prompt_file, num_prompts, lengths, seed), args.structured))
        prompts = random_prompts(num_prompts, lengths, self._vocabulary, seed)
        if args.prefixes:
            prompts = args.prefixes.before(prompts, self._vocabulary, seed)
        return self._asked(structured(self._as_sent(prompts), args.structured))

    def _asked(self, prompts: list[Prompt]) -> list[Prompt]:
        """Return the prompts with the sampling that the flags ask for."""
        return [replace(prompt, sampling=_sampling(self._args)) for prompt in prompts]

    def _as_sent(self, prompts: list[Prompt]) -> list[Prompt]:
        return self._words.written(prompts) if self._words else prompts

    def _seed(self, part: str) -> str:
        """Make a seed by workload, so that no server's prefix cache knows prompts of another workload."""
        return f"{self._args.seed}, {self.name}, {part}"


def _name(args: argparse.Namespace) -> str:
    """Make a workload's name from mode, lengths and number of requests."""
    name = f"{_mode(args)}, {_source(args)}/{_lengths(args).outputs}, {args.num_prompts * args.rounds} requests"
    name += f", {args.structured:.0%} held to a schema" if args.structured else ""
    name += f", beside {args.beside}" if args.beside else ""
    sampling = str(_sampling(args))
    return f"{sampling}: {name}" if sampling else name


def _mode(args: argparse.Namespace) -> str:
    if args.users:
        thinking = f" after {args.think_s:g} s" if args.think_s else ""
        return f"{args.users} users x {args.turns} turns{thinking}"
    if args.rate and args.burstiness != 1:
        return f"{args.rate:g} req/s in bursts ({args.burstiness:g})"
    return f"{args.rate:g} req/s" if args.rate else f"concurrency {args.concurrency}" if args.concurrency else "at once"


def _source(args: argparse.Namespace) -> str:
    """Name the source and length of prompts."""
    if args.prompt_file:
        return str(args.prompt_file.name)
    primed = f"{'crowded out, ' if args.crowd_out else ''}primed " if args.primed else ""
    prefixes = f"{primed}{args.prefixes}+" if args.prefixes else ""
    return f"{'text of ' if args.tokenizer else ''}{prefixes}{_lengths(args).inputs}"


def _sampling(args: argparse.Namespace) -> Sampling:
    return Sampling(args.temperature, args.top_p)


def _lengths(args: argparse.Namespace) -> Lengths:
    fixed = Lengths.fixed(args.input_len, args.output_len)
    return Lengths(args.input_range or fixed.inputs, args.output_range or fixed.outputs)
