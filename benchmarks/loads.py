"""Named loads, and the commands that send each by this project's client and by vLLM's.

    python -m benchmarks.loads                                      # list the loads.
    python -m benchmarks.loads first-page /tmp/qwen3-4b --runs 3    # print commands.

Nothing runs: the commands start both servers on one GPU, load both in one run, then each by vLLM's client. That client
sends texts; this one sends token ids, or with `--texts` texts of as many tokens.
"""

import argparse
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deploy.bench.load import Load
from deploy.bench.options import parse_args

URLS = ("http://127.0.0.1:8000", "http://127.0.0.1:8001")
MAX_LEN = 36_000
WARM_UP, OTHER_SEED = 8, 1000
"""Requests before each run of vLLM's client, from another seed; its own warm-up would send the first prompt."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A load: `rate` requests a second, `concurrency` streams, or all requests at once.

    Lengths are drawn evenly within `spread` of `num_inputs` and `num_outputs`, a part of each.
    """

    label: str
    num_inputs: int
    num_outputs: int
    num_prompts: int
    rate: float | None = None
    concurrency: int | None = None
    spread: float = 0.0
    burstiness: float = 1.0
    temperature: float = 0.0
    top_p: float = 1.0

    def ours(self) -> list[str]:
        """Return the flags of `benchmarks.serve`."""
        flags = ["--num-prompts", str(self.num_prompts)]
        if self.rate:
            flags += ["--rate", f"{self.rate:g}"]
        else:
            flags += ["--concurrency", str(self.concurrency)] if self.concurrency else ["--all-at-once"]
        for name, mean in (("input", self.num_inputs), ("output", self.num_outputs)):
            low, high = self.lengths(mean)
            flags += [f"--{name}-range", f"{low}-{high}"] if self.spread else [f"--{name}-len", str(mean)]
        if self.burstiness != 1:
            flags += ["--burstiness", f"{self.burstiness:g}"]
        if self.temperature:
            flags += ["--temperature", f"{self.temperature:g}", "--top-p", f"{self.top_p:g}"]
        return flags

    def theirs(self) -> list[str]:
        """Return the flags of `vllm bench serve`, which without `--temperature 0` would take the server's default."""
        flags = ["--dataset-name", "random", "--ignore-eos", "--temperature", f"{self.temperature:g}"]
        flags += ["--random-input-len", str(self.num_inputs), "--random-output-len", str(self.num_outputs)]
        if self.temperature:
            flags += ["--top-p", f"{self.top_p:g}"]
        if self.spread:
            flags += ["--random-range-ratio", f"{self.spread:g}"]
        if self.rate:
            flags += ["--request-rate", f"{self.rate:g}", "--burstiness", f"{self.burstiness:g}"]
        if self.concurrency:
            flags += ["--max-concurrency", str(self.concurrency)]
        return flags

    def lengths(self, mean: int) -> tuple[int, int]:
        """Return the least and the most tokens about a mean, as vLLM's client rounds them."""
        return max(1, math.floor(mean * (1 - self.spread))), math.ceil(mean * (1 + self.spread))

    @property
    def prefix(self) -> str:
        """Begin of the workload in results, without the number of requests."""
        return Load(parse_args(self.ours(), "")).name.removesuffix(f" {self.num_prompts} requests")


PRESETS = {
    "lone-short": Preset("one stream, 128/256", 128, 256, 16, concurrency=1),
    "lone": Preset("one stream, 1024/128", 1024, 128, 16, concurrency=1),
    "lone-long": Preset("one stream, 8192/32", 8192, 32, 8, concurrency=1),
    "lone-longest": Preset("one stream, 16000/32", 16_000, 32, 8, concurrency=1),
    "streams-8": Preset("8 streams, 1024/128", 1024, 128, 64, concurrency=8),
    "rate-16": Preset("16 requests/s, 1024/128", 1024, 128, 256, rate=16),
    "rate-32": Preset("32 requests/s, 1024/128", 1024, 128, 512, rate=32),
    "at-once": Preset("512 at once, 1024/128", 1024, 128, 512),
    "streams-64": Preset("64 streams, 1024/128", 1024, 128, 256, concurrency=64),
    "streams-256": Preset("256 streams, 128/512", 128, 512, 512, concurrency=256),
    "rate-8-long": Preset("8 requests/s, 4096/256", 4096, 256, 128, rate=8),
    "contexts": Preset("4 streams, 30000/128", 30_000, 128, 16, concurrency=4),
    "bursts": Preset("16 requests/s in bursts, 1024/128", 1024, 128, 256, rate=16, burstiness=0.2),
    "drawn": Preset("24 requests/s, about 1024/192", 1024, 192, 384, rate=24, spread=0.9),
    "drawn-sampled": Preset(
        "24 requests/s, about 1024/192, sampled", 1024, 192, 384, rate=24, spread=0.9, temperature=0.8, top_p=0.95
    ),
    "streams-sampled": Preset(
        "64 streams, 512/256, sampled", 512, 256, 256, concurrency=64, temperature=0.8, top_p=0.95
    ),
}  # fmt: skip
FIRST_PAGE = ("lone", "lone-longest", "streams-8", "rate-32", "at-once")
"""Loads of README.md; among them is one for each column that vLLM wins somewhere."""


def commands(names: Sequence[str], args: argparse.Namespace) -> Iterator[str]:
    """Yield lines of shell: the servers, then each load by both clients, `args.runs` times with a seed of its own."""
    memory, length = f"{args.memory:g}", str(MAX_LEN)
    ours = ["baton", "serve", args.model_dir, "--port", "8000", "--model-max-len", length]
    ours += ["--kv-memory-fraction", memory]
    theirs = ["vllm", "serve", args.model_dir, "--port", "8001", "--max-model-len", length]
    theirs += ["--gpu-memory-utilization", memory, "--enable-prompt-tokens-details"]
    yield "# two servers on one GPU, each in a shell of its own"
    yield from map(shlex.join, (ours, theirs))
    told = ["--tokenizer", args.model_dir] if args.texts else []
    told += ["--vs", URLS[1], "--vs-system", args.vs_system, "--started-by", shlex.join(ours)]
    told += ["--vs-started-by", shlex.join(theirs), "--results", args.results]
    for name in names:
        preset = PRESETS[name]
        yield f"# {name}: {preset.label}"
        for seed in range(args.seed, args.seed + args.runs):
            flags = [*preset.ours(), "--seed", str(seed), *told]
            yield shlex.join(["python", "-m", "benchmarks.serve", *flags])
            for url in URLS:
                yield from _vllm_client(preset, url, args.model_dir, seed)


def _vllm_client(preset: Preset, url: str, model_dir: str, seed: int) -> Iterator[str]:
    """Yield vLLM's client twice: some requests to warm up, then the load."""
    program = ["vllm", "bench", "serve", "--backend", "openai", "--base-url", url, "--tokenizer", model_dir]
    shown = ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99", "--save-result"]
    for count, number, more in ((WARM_UP, seed + OTHER_SEED, []), (preset.num_prompts, seed, shown)):
        yield shlex.join([*program, *preset.theirs(), "--num-prompts", str(count), "--seed", str(number), *more])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loads", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("loads", nargs="?", help="names with commas between, or first-page, or all")
    parser.add_argument("model_dir", nargs="?", default="MODEL_DIR", help="of the model that both serve")
    parser.add_argument("--runs", type=int, default=1, help="of each load; tables show the median (default: 1)")
    parser.add_argument("--seed", type=int, default=1, help="of the first run (default: 1)")
    parser.add_argument("--texts", action="store_true", help="send texts by this client, too")
    parser.add_argument("--memory", type=float, default=0.45, help="of the GPU for each server (default: 0.45)")
    parser.add_argument("--vs-system", default="vllm 0.32.0", help="label of vLLM in results (default: %(default)s)")
    parser.add_argument("--results", default="benchmarks/results.csv", help="of this client (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.loads is None:
        width = max(map(len, PRESETS))
        print("\n".join(f"{name:{width}}  {preset.label}" for name, preset in PRESETS.items()))
        return 0
    groups = {"first-page": list(FIRST_PAGE), "all": list(PRESETS)}
    names = groups.get(args.loads, args.loads.split(","))
    if unknown := [name for name in names if name not in PRESETS]:
        parser.error(f"{unknown[0]!r}: one of {', '.join([*groups, *PRESETS])}")
    print("\n".join(commands(names, args)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
