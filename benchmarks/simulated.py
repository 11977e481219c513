"""Errors of `baton plan`'s simulator: every load within its reach, simulated beside the measured figures.

    python -m benchmarks.simulated

Each load comes from the command in its row, with equal arrivals. Rates come from deploy/planning/step_times/measured.
Rates of other models than Qwen3-4B are scaled by shape, without any measurement of such a model alone. Turns are as in
the row, by its date and the flags of its workers. Prompts beside streams have 80 % of the GPU, whatever the row had.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import median

from benchmarks.presets import settings
from benchmarks.tables.cells import (
    FOUR_GPUS,
    MODEL,
    ONE_GPU,
    SMALL_GPU,
    TWO_GPUS,
    Cell,
    Line,
    TableData,
    newest,
    present,
    results,
)
from common.models.reading import decoder_config
from common.settings.slo_section import SloSection
from deploy.bench.load import Load as SentLoad
from deploy.bench.options import parse_args
from deploy.bench.results import Row
from deploy.planning.simulation.layout import parse_layout
from deploy.planning.simulation.loads import Arrival, Lengths, Load, Prefix
from deploy.planning.simulation.simulator import simulate
from deploy.planning.step_times.costs import Costs
from deploy.planning.step_times.memory import MEMORY_FRACTION
from deploy.planning.step_times.rates import Rates, read_rates
from deploy.planning.step_times.scaling import scaled
from deploy.planning.step_times.shape import shape_of

RATES = "h200-qwen3-4b"
FIGURES = ("ttft_p50", "tpot_p50", "output_throughput", "ttft_p99", "first_gap_p50", "itl_p99")
NO_TURNS = SloSection(itl_ms=0.0)
TURNS_SINCE = "2026-11-27"
"""Date of the first rows whose workers take turns unless told otherwise."""
CLOSE = 0.2
"""Error up to which a figure counts as met."""
FRACTIONS = {(SMALL_GPU, "qwen3-8b"): 0.17, (ONE_GPU, "qwen3-32b"): 0.6}
"""Systems' share of a GPU's memory, where not the default (README.md, *Other models*)."""


BESIDE = "vllm"
"""System beside which loads with turns were measured, each server alone at work."""


@dataclass(frozen=True, slots=True)
class Case:
    """A load on a system: the keys of its rows, and its workers."""

    workload: str  # prefix of the row's workload
    hardware: str
    system: str
    layout: str
    num_gpus: int
    model: str = MODEL
    beside: str = ""  # the other system of the run

    @property
    def label(self) -> str:
        model = "" if self.model == MODEL else f"{self.model} "
        gpus = f"{self.num_gpus} GPUs" if self.num_gpus > 1 else "1 GPU"
        gpus += (
            " with 24 GB" if self.hardware == SMALL_GPU else " of a machine of 4" if self.hardware == FOUR_GPUS else ""
        )
        load = self.workload.removesuffix(",").removesuffix(" requests")
        turns = ", turns" if self.beside else ""
        return f"{model}{self.layout} on {gpus}, {load}{turns}"


def _cases() -> Iterator[Case]:
    lone = [f"concurrency 1, {lengths}," for lengths in ("128/256", "1024/128", "8192/32", "16000/32")]
    loads = ["concurrency 8, 1024/128,", "concurrency 64, 1024/128,", "16 req/s, 1024/128,",
             "32 req/s, 1024/128,", "at once, 1024/128,"]  # fmt: skip
    small = ["64 req/s, 64/64,", "at once, 64/64,", "at once, 8192/1,", "at once, 100-8000/1,"]
    known = [f"concurrency 1, primed 1x{cached}+16/2," for cached in (1008, 8176, 15984)]
    known.append("at once, 8x4096+256/128,")
    yield from (Case(load, ONE_GPU, "baton", "1P1D", 1) for load in (*lone, *loads, *small, *known))
    turning = ["concurrency 8, 1024/128,", "concurrency 64, 1024/128,", "32 req/s, 1024/128,", "at once, 1024/128, 512",
               "8 req/s, 4096/256,", "concurrency 4, 30000/128,", "concurrency 256, 128/512,"]  # fmt: skip
    yield from (Case(load, ONE_GPU, "baton", "1P1D", 1, beside=BESIDE) for load in turning)
    yield from (Case(load, TWO_GPUS, "baton 1P1D", "1P1D", 2) for load in (*lone, *loads))
    shared = ("concurrency 1, 1024/128,", "32 req/s, 1024/128,", "at once, 1024/128,",
              "24 req/s, 400x4096 (Zipf 1)+256/128,")  # fmt: skip
    yield from (Case(load, TWO_GPUS, "baton 2P2D", "2P2D", 2) for load in shared)
    four = {"1P1D": 2, "1P2D": 3, "2P2D": 4, "3P1D": 4}
    yield from (Case("at once, 1024/128,", FOUR_GPUS, f"baton {name}", name, gpus) for name, gpus in four.items())
    for model, counts in {"qwen3-8b": (1, 8), "llama3.1-8b": (1, 8), "qwen3-32b": (1, 8, 32)}.items():
        yield from (Case(f"concurrency {count}, 1024/128,", ONE_GPU, "baton", "1P1D", 1, model) for count in counts)
    yield Case("concurrency 1, 8192/32,", ONE_GPU, "baton", "1P1D", 1, "qwen3-32b")
    yield from (Case(f"concurrency {n}, 1024/128,", SMALL_GPU, "baton", "1P1D", 1, "qwen3-8b") for n in (1, 8, 16))


CASES = tuple(_cases())


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure of a case."""

    case: Case
    row: Row
    figure: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1

    @property
    def is_close(self) -> bool:
        return abs(self.error) <= CLOSE


def compare(case: Case, rows: Sequence[Row]) -> list[Comparison]:
    """Compare every figure of the newest runs of the case's load, by medians; empty without a run."""
    kind = {"model": case.model, "beside": case.beside}
    cells = {name: newest(rows, case.hardware, case.system, case.workload, name, **kind) for name in FIGURES}
    rows_of = {name: cell for name, cell in cells.items() if cell is not None and cell.value > 0}
    if not rows_of:
        return []
    first = next(iter(rows_of.values())).row
    fraction = FRACTIONS.get((case.hardware, case.model), _flags(first).get("--kv-memory-fraction", MEMORY_FRACTION))
    costs = Costs(_rates(case.model), memory_fraction=fraction)
    layout = parse_layout(case.layout, case.num_gpus)
    loads = [load_of(run.command) for run in first.runs or [first]]
    if max(each.num_outputs for each in loads[0].arrivals) == 2:
        del rows_of["tpot_p50"]  # the first gap by another name
    outcomes = [simulate(layout, costs, load, targets=targets_of(first)) for load in loads]
    return [
        Comparison(case, cell.row, name, cell.value, median(outcome.figure(name) for outcome in outcomes))
        for name, cell in rows_of.items()
    ]


def table(rows: Sequence[Row]) -> TableData:
    """Make a line for each case, with each figure beside the simulated figure."""
    titles = {"ttft_p50": "TTFT p50, ms", "tpot_p50": "TPOT p50, ms", "output_throughput": "output tokens/s",
              "ttft_p99": "TTFT p99, ms", "first_gap_p50": "first gap p50, ms", "itl_p99": "ITL p99, ms"}  # fmt: skip
    lines: list[Line] = []
    for case in CASES:
        told = {each.figure: each for each in compare(case, rows)}
        cells = [Cell(each.row, each.measured, each.simulated, CLOSE) if (each := told.get(name)) else None
                 for name in titles]  # fmt: skip
        lines.append((case.label, cells))
    return TableData("measured · simulated, bold where more than 20 % off; H200s", "workers and load",
                     list(titles.values()), present(lines))  # fmt: skip


def targets_of(row: Row) -> SloSection:
    """Return the targets of a row's workers, by the command that started them."""
    told, usual = _flags(row), SloSection() if row.date >= TURNS_SINCE else NO_TURNS
    return SloSection(told.get("--slo-itl-ms", usual.itl_ms), told.get("--slo-ttft-ms", usual.ttft_ms))


def _flags(row: Row) -> dict[str, float]:
    """Return what matters here of the command that started a row's workers."""
    names = ("--slo-itl-ms", "--slo-ttft-ms", "--kv-memory-fraction")
    return {name: float(value) for name, value in pairwise(shlex.split(row.started_by)) if name in names}


def load_of(command: str) -> Load:
    """Return the load sent by a `benchmarks.serve` command in its first round."""
    args = parse_args(shlex.split(command)[3:], "")
    sent = SentLoad(args)
    known = [Prefix(k, args.prefixes.num_tokens) for k in range(args.prefixes.count)] if args.prefixes else []
    if args.input_range or args.output_range:
        lengths = [Lengths(prompt.num_tokens or 0, prompt.max_tokens) for prompt in sent.prompts(0)]
    else:
        num_inputs = args.input_len + (args.prefixes.num_tokens if args.prefixes else 0)
        lengths = [Lengths(num_inputs, args.output_len)] * args.num_prompts
    prefixes = [known[k] for k in sent.prefixes(0, len(lengths))] if known else [None] * len(lengths)
    sent_ones = zip(sent.arrivals_s(0, len(lengths)), lengths, prefixes, strict=True)
    arrivals = [Arrival(time_s * 1e3, *each, prefix=prefix) for time_s, each, prefix in sent_ones]
    return Load(arrivals, num_streams=args.concurrency or 0, known=known if args.primed else ())


@cache
def _rates(model: str) -> Rates:
    known = read_rates(RATES)
    return known if model == known.model else scaled(known, shape_of(decoder_config(settings(model))), model)


def main() -> None:
    rows = results()
    for case in CASES:
        told = compare(case, rows)
        print(case.label)
        for each in told:
            mark = "" if each.is_close else "  MISS"
            print(f"  {each.figure:18} {each.measured:10,.2f} {each.simulated:10,.2f} {each.error:+7.0%}{mark}")


if __name__ == "__main__":
    main()
