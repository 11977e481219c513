"""First and second tokens of prompts that are decoded on another host, beside those of one host and the transfer.

    python -m benchmarks.distance [--mbit-per-s 10000 1000] [--length 1024] [--requests 20]

Hosts are network namespaces, joined by a link of that rate, so it needs root. Two systems of a worker of each kind are
asked in turn, one request at a time. One is on a single host, where blocks stay in the pool. The prompts of the other
are decoded on another host. The first token needs no transfer, the second does. A transfer lasts as long as the bytes
that were pulled need at the rate of a plain socket over the same link. All share the machine's cores, so only ratios
are a claim. The model has random weights, and much KV for its computation.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import median

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.link_rate import rate
from benchmarks.make_checkpoint import copy_tokenizer, weight_shapes, write_weights
from deploy.bench.client import Target, open_session
from deploy.bench.origin import hardware
from deploy.bench.results import append_rows, row_of
from deploy.bench.stats import Figure
from deploy.bench.workload import Lengths, random_prompts
from tests.e2e.system import System
from tests.e2e.two_hosts import BACK, FRONT, TwoHosts
from tests.support.hosts import Hosts, problem

DEMO_MODEL = Path(__file__).parents[1] / "deploy" / "demo_model"
MUCH_KV = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128}
FLAGS = ("--kv-min-gb-per-s", "0", "--kv-cpu-pool-bytes", str(1 << 30), "--model-dtype", "float32")
NUM_OUTPUTS, WARM_UP = 8, 2
LINK_BYTES = 400 << 20
SILENCE_S, DEADLINE_S = 30.0, 120.0
ONE_HOST_PORT = 7100


class OneHost(TwoHosts):
    """The same system with all of it on one host."""

    router_port = ONE_HOST_PORT

    def host_of(self, name: str) -> str:
        return FRONT


@dataclass(frozen=True, slots=True)
class Tokens:
    """First and second tokens of a request, in seconds after it was sent."""

    first_s: float
    second_s: float


def figures_of(here: Sequence[Tokens], apart: Sequence[Tokens], transfer_s: float) -> list[Figure]:
    """Return medians, and by how much those of two hosts exceed those of one and the transfer.

    The excess is a median over pairs of requests, which were sent one after the other.
    """
    figures = [Figure("transfer", transfer_s * 1e3, "ms")]
    for name, part in (("ttft", attrgetter("first_s")), ("second", attrgetter("second_s"))):
        pairs = [(part(one), part(two)) for one, two in zip(here, apart, strict=True)]
        over = median(two / (one + transfer_s) - 1 for one, two in pairs)
        figures += [
            Figure(f"one_host_{name}", median(one for one, _ in pairs) * 1e3, "ms"),
            Figure(name, median(two for _, two in pairs) * 1e3, "ms"),
            Figure(f"{name}_over", 100 * over, "%"),
        ]
    return figures


async def ask(system: System, length: int, seed: str) -> Tokens:
    """Send a request of a new prompt; raises RuntimeError if it fails."""
    [prompt] = random_prompts(1, Lengths.fixed(length, NUM_OUTPUTS), range(1, 2000), seed)
    async with open_session() as session:
        target = Target(session, system.url, "m", DEADLINE_S)
        record = await target.complete(prompt, prompt.body("m"))
    if record.error:
        raise RuntimeError(record.error)
    first_s, second_s = (at_s - record.sent_s for at_s in record.chunk_times_s[:2])
    return Tokens(first_s, second_s)


def pulled(system: System) -> tuple[float, float]:
    """Return bytes and seconds of all pulls by decode workers."""
    families = list(text_string_to_metric_families(system.text("/metrics")))

    def total(name: str) -> float:
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    return total("baton_worker_pulled_bytes_total"), total("baton_worker_pull_seconds_total")


def write_model(directory: Path) -> None:
    """Write a checkpoint with much KV for its computation, and the demo model's tokenizer."""
    config = json.loads((DEMO_MODEL / "config.json").read_text()) | MUCH_KV
    (directory / "config.json").write_text(json.dumps(config))
    copy_tokenizer(DEMO_MODEL, directory)
    write_weights(weight_shapes(config), directory, seed=0)


async def measure(args: argparse.Namespace, hosts: Hosts, here: System, apart: System, mbit_per_s: int) -> list[Figure]:
    """Ask both systems in turn over a link of that rate; raises RuntimeError if nothing was pulled."""
    hosts.slow(FRONT, mbit_per_s)
    try:
        times: dict[System, list[Tokens]] = {here: [], apart: []}
        begin = pulled(apart)
        for number in range(WARM_UP + args.requests):
            if number == WARM_UP:
                begin = pulled(apart)
            for system, found in times.items():
                tokens = await ask(system, args.length, f"{mbit_per_s} {number}")
                if number >= WARM_UP:
                    found.append(tokens)
        await asyncio.to_thread(apart.until, apart.all_blocks_free)
        moved, pull_s = ((now - before) / args.requests for now, before in zip(pulled(apart), begin, strict=True))
        if not moved:
            raise RuntimeError("no blocks were pulled")
        ends = hosts.command(BACK, []), hosts.command(FRONT, [])
        gb_per_s = rate(*ends, hosts.addresses[BACK], min(LINK_BYTES, mbit_per_s * 10**6 // 4))
        link = [Figure("link", gb_per_s, "GB/s"), Figure("pull", pull_s * 1e3, "ms")]
        return [*link, *figures_of(times[here], times[apart], moved / gb_per_s / 1e9)]
    finally:
        hosts.free(FRONT)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mbit-per-s", nargs="+", type=int, default=[10_000, 1_000], help="of the link, in turn")
    parser.add_argument("--length", type=int, default=1024, help="prompt tokens (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=20, help="of each system (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="file to append a row a rate to")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run the benchmark; return 2 where there can be no hosts."""
    args = parse_args(argv)
    if why := problem():
        print(f"no two hosts here: {why}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="baton-") as directory, Hosts(FRONT, BACK) as hosts:
        write_model(Path(directory))
        with (
            OneHost(hosts, Path(directory), *FLAGS, silence_s=SILENCE_S) as here,
            TwoHosts(hosts, Path(directory), *FLAGS, silence_s=SILENCE_S) as apart,
        ):
            here.start(1, 1)
            apart.start_two()
            for mbit_per_s in args.mbit_per_s:
                figures = asyncio.run(measure(args, hosts, here, apart, mbit_per_s))
                workload = f"prompts of {args.length} tokens decoded on another host, {mbit_per_s} Mbit/s"
                for figure in figures:
                    print(f"{workload}: {figure.value:.3g} {figure.unit} {figure.name}")
                if args.results:
                    rows = [row_of(hardware(), "much KV, random", workload, figure) for figure in figures]
                    append_rows(args.results, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
