"""Starts of `baton serve` by parts, from the command until all is ready and the first token is there.

    python -m benchmarks.start MODEL [--starts 5] [--results benchmarks/results.csv] [-- OPTION ...]

Options behind `--` are those of `baton serve`. A cold start has an empty directory for compiled kernels, so all are
compiled; a cached start finds those of an uncounted start before. Kinds take turns, and figures are medians. A part of
a process lasts from the end of the part before. `begins` is the time of the process's fork, after the command. CPU
seconds of a process are those until it was ready. Those of the start, `start_cpu`, are of all processes until the end,
without a daemon of MPS. The fork server and processes for grammars are in them alone.
"""

import argparse
import http.client
import json
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from deploy.bench.origin import hardware
from deploy.bench.results import append_rows, row_of
from deploy.bench.stats import Figure
from tests.support.ports import ReservedPort

ROOT = Path(__file__).resolve().parents[1]
WORKLOADS = {"cold": "start, nothing compiled before", "cached": "start, kernels on disk"}
AHEAD = "start, kernels compiled ahead"
"""Workload of a cold start with a file of kernels."""
LAST_LINES = 20
"""Lines of the log shown after a failed start."""


@dataclass(frozen=True, slots=True)
class Start:
    """A start, in seconds after the command."""

    ready_s: float
    first_token_s: float
    cpu_s: float
    parts: dict[str, list[tuple[str, float]]]  # by process, each beginning with `begins`, and with `CPU` at the end


def start_once(model: str, flags: Sequence[str], kernels: Path, deadline_s: float) -> Start:
    """Start the server, ask for a token and end the server; raises RuntimeError if it ends before it is ready."""
    used_s, log = _children_s(), list[str]()
    parts: dict[str, list[tuple[str, float]]] = {}
    with ReservedPort() as port:
        path = str(Path(model).absolute()) if Path(model).exists() else model
        command = ["env", f"TRITON_CACHE_DIR={kernels}", sys.executable, "-m", "deploy", "serve", path, *flags]
        begin_s = time.monotonic()
        with subprocess.Popen(
            [*command, "--port", str(port.number), "--log-format", "json"],
            cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stderr is not None
            too_late = threading.Timer(deadline_s, process.kill)
            too_late.start()
            try:
                for line in process.stderr:
                    log.append(line)
                    if (told := _told(line, begin_s)) is not None:
                        parts.update([told])
                    if "baton" in parts:
                        break
                else:
                    raise RuntimeError(f"no start of {model}:\n{''.join(log[-LAST_LINES:])}")
                ready_s = time.monotonic() - begin_s
                _ask(port.number)
                first_token_s = time.monotonic() - begin_s
                process.send_signal(signal.SIGINT)
                for _ in process.stderr:
                    pass
            finally:
                too_late.cancel()
                process.terminate()
    return Start(ready_s, first_token_s, _children_s() - used_s, parts)


def _told(line: str, begin_s: float) -> tuple[str, list[tuple[str, float]]] | None:
    """Return the process and the parts of a line about a start, or None for any other line."""
    with suppress(ValueError):
        said = json.loads(line)
        if isinstance(said, dict) and "start" in said:
            start = said["start"]
            begins = ("begins", max(0.0, start["began_s"] - begin_s))
            parts = [(part, seconds) for part, seconds in start["parts"]]
            return said["process"], [begins, *parts, ("CPU", start["cpu_s"])]
    return None


def _ask(port: int) -> None:
    """Wait for the first token of a text; raises RuntimeError if none comes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 2, "stream": True, "ignore_eos": True})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    first = answer.readline()
    if answer.status != http.HTTPStatus.OK or not first.startswith(b"data: {"):
        raise RuntimeError(f"status {answer.status}: {first.decode(errors='replace')}")
    answer.read()
    connection.close()


def _children_s() -> float:
    """Return the CPU seconds of all ended children and of the children that those awaited."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def figures_of(starts: Sequence[Start]) -> list[Figure]:
    """Return medians over the starts of a kind: of the whole, then of each process's parts in the first's order."""
    whole = [
        Figure("ready", median(each.ready_s for each in starts), "s"),
        Figure("first_token", median(each.first_token_s for each in starts), "s"),
        Figure("start_cpu", median(each.cpu_s for each in starts), "s"),
    ]
    order = dict.fromkeys(
        (process, part) for start in starts for process, parts in start.parts.items() for part, _ in parts
    )
    values = [{(process, part): s for process, parts in each.parts.items() for part, s in parts} for each in starts]
    names = (
        (
            f"start_{process}_{part}".replace(" ", "_"),
            [each[process, part] for each in values if (process, part) in each],
        )
        for process, part in order
    )
    return [*whole, *(Figure(name, median(seconds), "s") for name, seconds in names)]


def run(args: argparse.Namespace, console: Console) -> None:
    """Start all kinds by turns; show the figures and append the rows."""
    starts: dict[str, list[Start]] = {kind: [] for kind in args.kinds}
    with tempfile.TemporaryDirectory(prefix="baton-start-") as kept:
        if "cached" in starts:
            start_once(args.model, args.flags, Path(kept), args.deadline_s)
        for kind in chain.from_iterable([args.kinds] * args.starts):
            with tempfile.TemporaryDirectory(prefix="baton-start-") as empty:
                kernels = Path(kept if kind == "cached" else empty)
                starts[kind].append(start_once(args.model, args.flags, kernels, args.deadline_s))
    figures = {kind: figures_of(each) for kind, each in starts.items()}
    table = Table("figure, s", *figures, title=f"{args.model}: {args.starts} starts of each kind, medians")
    for name in dict.fromkeys(figure.name for each in figures.values() for figure in each):
        by_kind = ({figure.name: f"{figure.value:.2f}" for figure in each} for each in figures.values())
        table.add_row(name, *(each.get(name, "") for each in by_kind))
    console.print(table)
    if args.results:
        name, model = args.hardware or hardware(), Path(args.model).name
        workloads = WORKLOADS | ({"cold": AHEAD} if "--kernels-compiled" in args.flags else {})
        rows = [row_of(name, model, workloads[kind], each) for kind in figures for each in figures[kind]]
        append_rows(args.results, rows)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start",
        usage="%(prog)s MODEL [option ...] [-- OPTION-OF-BATON-SERVE ...]",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("model", help="model directory or Hub id, as baton serve takes it")
    parser.add_argument("--starts", type=int, default=5, help="starts of each kind (default: 5)")
    parser.add_argument("--kinds", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS], help="(default: all)")
    parser.add_argument("--deadline-s", type=float, default=300.0, help="for one start (default: 300)")
    parser.add_argument("--results", type=Path, help="file to append a row a run to")
    parser.add_argument("--hardware", help="in the results (default: the GPU's name, or the CPU's)")
    own = argv[: argv.index("--")] if "--" in argv else argv
    return parser.parse_args(own, argparse.Namespace(flags=argv[len(own) + 1 :]))


def main(argv: list[str] | None = None) -> int:
    run(parse_args(sys.argv[1:] if argv is None else argv), Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
