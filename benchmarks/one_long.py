"""Effects of a long request on streams of short contexts: while the prompt is computed, and while tokens are decoded.

    python -m benchmarks.one_long --url http://127.0.0.1:8000 [--streams 8,32,64] [--input-len 1000] [--long-len 32000]

Gaps between chunks are taken for each number of streams, in three spans. The first span is without the long request,
the second until the long request's first token, the third from there to its end. The long request's TTFT is shown too,
beside the TTFT on an idle server. With `--vs` a second server gets the same load in the same run, turn by turn.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.streams import exit_code, streaming
from common.base.percentiles import percentile
from deploy.bench.client import Target, open_session, served_model
from deploy.bench.origin import hardware
from deploy.bench.results import append_rows, row_of
from deploy.bench.stats import Figure, RequestRecord
from deploy.bench.workload import Lengths, Prompt, numbers, random_prompts


@dataclass(frozen=True, slots=True)
class Span:
    """A span of time for gaps, in seconds on the clock of `RequestRecord`."""

    name: str
    begin_s: float
    end_s: float

    def figures(self, streams: Sequence[RequestRecord]) -> list[Figure]:
        """Return ITL p50 and p99 of the gaps within the span."""
        gaps = sorted(gap for stream in streams for gap in self._gaps(stream.chunk_times_s))
        return [Figure(f"itl_{self.name}_p{point}", percentile(gaps, point) * 1e3, "ms") for point in (50, 99)]

    def _gaps(self, times_s: Sequence[float]) -> Iterable[float]:
        inside = [time_s for time_s in times_s if self.begin_s <= time_s <= self.end_s]
        return (after - before for before, after in pairwise(inside))


async def measure(args: argparse.Namespace, target: Target, num_streams: int) -> list[Figure]:
    """Run a load on a server, and return the figures."""
    prompts = _prompts(args, num_streams, args.input_len, args.max_tokens, f"{num_streams} streams")
    long_prompts = _prompts(args, 2, args.long_len, args.long_output_len, f"one long beside {num_streams}")
    alone, beside = zip(long_prompts, target.prepare(long_prompts), strict=True)
    quiet = await _complete(target, *alone)
    async with streaming(target, prompts, args.deadline_s) as streams:
        await asyncio.sleep(args.alone_s / 2)
        begin_s = time.perf_counter()
        await asyncio.sleep(args.alone_s)
        long = await _complete(target, *beside)
    spans = (
        Span("alone", begin_s, long.sent_s),
        Span("prefill", long.sent_s, long.chunk_times_s[0]),
        Span("decode", long.chunk_times_s[0], long.ended_s),
    )
    return [
        *(figure for span in spans for figure in span.figures(streams)),
        Figure("long_ttft", long.ttft_s * 1e3, "ms"),
        Figure("long_ttft_alone", quiet.ttft_s * 1e3, "ms"),
    ]


async def _complete(target: Target, prompt: Prompt, body: bytes) -> RequestRecord:
    record = await target.complete(prompt, body)
    if record.error:
        raise RuntimeError(f"the long request failed: {record.error}")
    return record


def _prompts(args: argparse.Namespace, count: int, num_tokens: int, max_tokens: int, part: str) -> list[Prompt]:
    lengths = Lengths.fixed(num_tokens, max_tokens)
    return random_prompts(count, lengths, range(args.vocab_size), f"{args.seed}, {part}")


def workload_name(args: argparse.Namespace, num_streams: int) -> str:
    return f"{num_streams} streams of {args.input_len} tokens and one of {args.long_len}"


async def run(args: argparse.Namespace, console: Console) -> None:
    """Run every load on every server; show the figures and append the rows of each load at its end."""
    urls = {args.system: args.url.rstrip("/")} | ({args.vs_system: args.vs.rstrip("/")} if args.vs else {})
    async with open_session() as session:
        models = {label: await served_model(session, url, args.deadline_s) for label, url in urls.items()}
        targets = [Target(session, url, models[label], args.deadline_s) for label, url in urls.items()]
        for num_streams in args.streams:
            figures = [await measure(args, target, num_streams) for target in targets]
            show(console, list(urls), workload_name(args, num_streams), figures)
            if args.results:
                keep(args, models[args.system], num_streams, figures)


def show(console: Console, labels: Sequence[str], title: str, figures: Sequence[Sequence[Figure]]) -> None:
    table = Table("figure", *labels, title=title)
    for same in zip(*figures, strict=True):
        table.add_row(f"{same[0].name} {same[0].unit}", *(f"{figure.value:,.2f}" for figure in same))
    console.print(table)


def keep(args: argparse.Namespace, model: str, num_streams: int, figures: Sequence[Sequence[Figure]]) -> None:
    name, workload = args.hardware or hardware(), workload_name(args, num_streams)
    rows = [
        row_of(
            name,
            model,
            workload,
            mine,
            system=args.system,
            beside=(args.vs_system, theirs[0].value) if theirs else None,
            started=(args.started_by, args.vs_started_by if theirs else ""),
        )
        for mine, *theirs in zip(*figures, strict=True)
    ]
    append_rows(args.results, rows)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_long", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server to load")
    parser.add_argument("--vs", metavar="URL", help="second server, loaded turn by turn with the first")
    parser.add_argument("--system", default="baton", help="label of the first server")
    parser.add_argument("--vs-system", default="other", help="label of the second server")
    parser.add_argument("--started-by", default="", metavar="COMMAND", help="that started the first server")
    parser.add_argument("--vs-started-by", default="", metavar="COMMAND", help="that started the second server")
    parser.add_argument("--streams", type=numbers, default=[8, 32, 64], help="numbers of streams (default: 8,32,64)")
    parser.add_argument("--input-len", type=int, default=1000, help="prompt tokens of a stream (default: 1000)")
    parser.add_argument("--max-tokens", type=int, default=4000, help="a stream must not end before (default: 4000)")
    parser.add_argument("--long-len", type=int, default=32_000, help="tokens of the long prompt (default: 32000)")
    parser.add_argument("--long-output-len", type=int, default=200, help="its output tokens (default: 200)")
    parser.add_argument("--alone-s", type=float, default=2.0, help="streams are watched alone so long (default: 2)")
    parser.add_argument("--vocab-size", type=int, default=151_000, help="prompt ids are below this (default: 151000)")
    parser.add_argument("--deadline-s", type=float, default=300.0, help="for one request (default: 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="file to append a row a run to")
    parser.add_argument("--hardware", help="in the results (default: the GPU's name, or the CPU's)")
    args = parser.parse_args(argv)
    lengths = (args.input_len, args.max_tokens, args.long_len, args.long_output_len, args.vocab_size)
    if min(*args.streams, *lengths) < 1:
        parser.error("--streams and all lengths: at least 1")
    return args


def main(argv: list[str]) -> int:
    """Run the benchmark; return 1 when a request failed or a stream ended early."""
    args, console = parse_args(argv), Console()
    return exit_code(run(args, console), console, late=f"no stream began within {args.deadline_s:g} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
