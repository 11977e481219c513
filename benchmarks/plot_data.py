"""Rows of results.csv for each plot. Pure: rows in, numbers out; `plots` does the drawing."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.tables.cells import MODEL, ONE_GPU
from deploy.bench.results import Row

MIN_BATCHES = 3
STEP = re.compile(r"decode step alone, (\d+) sequences at (\d+) tokens")
CAP = re.compile(r"baton, MPS (\d+) %")
RATE = re.compile(r"([\d.]+ req/s), ")
WORKERS = re.compile(r"baton (\d+)P(\d+)D")
SCALING_HARDWARE = "4 x NVIDIA H200"
ALL_AT_ONCE = "at once"
PREFIXES = re.compile(r"\dx\d")
MODES = ("concurrency", "req/s", "users", ALL_AT_ONCE)


class MissingRows(Exception):
    """Rows for a plot are missing; the message names the rows and the program that makes such rows."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """(batch, step ms, floor ms) in order of batch, for each context in tokens."""

    subject: str
    by_context: dict[int, list[tuple[int, float, float]]]


def step_times(rows: Sequence[Row]) -> StepTimes:
    """Return the times of decode steps of `MODEL` alone on an H200; raises MissingRows."""
    found = {}
    subject = ""
    for row in rows:
        match = STEP.fullmatch(row.workload)
        of_model = (row.hardware, row.system, row.model, row.figure) == (ONE_GPU, "baton", MODEL, "step")
        if match and of_model and row.compared_with == "read floor":
            batch, context = int(match[1]), int(match[2])
            found[context, batch] = (batch, row.value, row.compared_value)
            subject = _subject(row)
    by_context: dict[int, list[tuple[int, float, float]]] = {}
    for context, batch in sorted(found):
        by_context.setdefault(context, []).append(found[context, batch])
    long_enough = {context: points for context, points in by_context.items() if len(points) >= MIN_BATCHES}
    if not long_enough:
        raise MissingRows(
            f"no context has {MIN_BATCHES} batches; `python -m benchmarks.decode_step MODEL_DIR --results` adds rows"
        )
    return StepTimes(subject, long_enough)


@dataclass(frozen=True, slots=True)
class MpsCaps:
    """(cap in percent, ms) in order of the cap, by load, by panel title."""

    subject: str
    panels: dict[str, dict[str, list[tuple[int, float]]]]

    @property
    def caps(self) -> list[int]:
        return sorted({cap for by_load in self.panels.values() for points in by_load.values() for cap, _ in points})


def mps_caps(rows: Sequence[Row]) -> MpsCaps:
    """Return loads of a fixed rate measured at two caps or more; raises MissingRows."""
    titles = {"ttft_p50": "TTFT p50", "itl_p99": "ITL p99"}
    found: dict[str, dict[str, dict[int, float]]] = {figure: {} for figure in titles}
    subject = ""
    for row in rows:
        system, load = CAP.fullmatch(row.system), RATE.match(row.workload)
        if system and load and row.figure in titles:
            found[row.figure].setdefault(load[1], {})[int(system[1])] = row.value
            subject = f"{_subject(row)}, {row.workload.split(', ')[1]} tokens"
    panels = {
        titles[figure]: {
            load: sorted(by_cap.items()) for load, by_cap in sorted(by_load.items(), key=_rate) if len(by_cap) > 1
        }
        for figure, by_load in found.items()
    }
    if not all(panels.values()):
        raise MissingRows("no rate was measured at two caps; rows of systems `baton, MPS NN %` by benchmarks.serve")
    return MpsCaps(subject, panels)


def _rate(entry: tuple[str, object]) -> float:
    return float(entry[0].split()[0])


@dataclass(frozen=True, slots=True)
class Scaling:
    """Output tokens/s by (prefill workers, decode workers), fewest workers first."""

    subject: str
    values: dict[tuple[int, int], float]


def scaling(rows: Sequence[Row]) -> Scaling:
    """Return the all-at-once load measured with the most numbers of workers; raises MissingRows."""
    by_workload: dict[str, dict[tuple[int, int], float]] = {}
    model = ""
    for row in rows:
        match = WORKERS.fullmatch(row.system)
        if match and row.hardware == SCALING_HARDWARE and row.figure == "output_throughput":
            model = row.model
            if row.workload.startswith(ALL_AT_ONCE):
                by_workload.setdefault(row.workload, {})[int(match[1]), int(match[2])] = row.value
    if not by_workload:
        raise MissingRows(f"no rows of systems `baton NPMD` on {SCALING_HARDWARE} with all requests at once")
    workload, values = max(by_workload.items(), key=lambda entry: len(entry[1]))
    ordered = sorted(values.items(), key=lambda entry: (sum(entry[0]), entry[0]))
    return Scaling(f"{model} on H200, {workload}", dict(ordered))


@dataclass(frozen=True, slots=True)
class Panel:
    """A figure of a row, its title on the page, and the better direction."""

    figure: str
    title: str
    better: str


BESIDE_PANELS = (
    Panel("ttft_p50", "TTFT p50, ms", "lower is better"),
    Panel("tpot_p50", "TPOT p50, ms", "lower is better"),
    Panel("itl_p99", "ITL p99, ms", "lower is better"),
    Panel("output_throughput", "Output tokens/s", "higher is better"),
)
MEANINGLESS = ((ALL_AT_ONCE, "ttft_p50"), (ALL_AT_ONCE, "tpot_p50"), (ALL_AT_ONCE, "itl_p99"))
"""(load, figure): with everything sent at once, latencies measure the queue."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Figures of two systems by (workload, system, figure)."""

    subject: str
    ours: str
    theirs: str
    workloads: list[str]
    figures: dict[tuple[str, str, str], float]

    def value(self, workload: str, system: str, figure: str) -> float | None:
        return self.figures.get((workload, system, figure))


def beside(rows: Sequence[Row]) -> Beside:
    """Return loads of `MODEL` run by both Baton and vLLM on the same hardware; raises MissingRows.

    Figures of a common run win over figures of separate runs.
    """
    paired = [
        row for row in rows if (row.system, row.model) == ("baton", MODEL) and row.compared_with.startswith("vllm")
    ]
    if not paired:
        raise MissingRows("no rows of system `baton` compared with vllm; `python -m benchmarks.serve --vs` makes them")
    hardware, theirs = paired[-1].hardware, paired[-1].compared_with
    mine = [row for row in rows if (row.hardware, row.model) == (hardware, MODEL)]
    alone = [row for row in mine if row.system in ("baton", theirs) and not row.compared_with]
    figures: dict[tuple[str, str, str], float] = {}
    for row in [*alone, *(row for row in paired if row in mine and row.compared_with == theirs)]:
        figures.update(_figures_of(row))
    both = {load for load, system, _ in figures if system == "baton"} & {
        load for load, system, _ in figures if system == theirs
    }
    return Beside(_subject(paired[-1]), "baton", theirs, sorted(both, key=_place), figures)


def _place(load: str) -> tuple[int, bool, list[int], str]:
    """Return a load's place among others: by mode, then without prefixes, then by its numbers."""
    mode = next((place for place, mode in enumerate(MODES) if mode in load), len(MODES))
    return mode, bool(PREFIXES.search(load)), [int(number) for number in re.findall(r"\d+", load)], load


def _figures_of(row: Row) -> Iterator[tuple[tuple[str, str, str], float]]:
    """Yield a row's figure, and the figure compared with, if any."""
    load, _, _ = row.workload.rpartition(", ")  # without the number of requests
    meaningless = any(load.startswith(start) and row.figure == figure for start, figure in MEANINGLESS)
    if meaningless or row.figure not in {panel.figure for panel in BESIDE_PANELS}:
        return
    yield (load, row.system, row.figure), row.value
    if row.compared_with:
        yield (load, row.compared_with, row.figure), row.compared_value


def _subject(row: Row) -> str:
    return f"{row.model} on {row.hardware.removeprefix('NVIDIA ')}"
