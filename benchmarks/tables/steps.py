"""Tables of measurements without a server: steps, kernels, handoffs."""

import re
from collections.abc import Sequence

from benchmarks.tables.cells import MODEL, ONE_GPU, Cell, Line, TableData, other, own
from deploy.bench.results import Row

STEP = re.compile(r"decode step alone, (\d+) sequences at (\d+) tokens")
SHARED = re.compile(r"decode step alone, (\d+) sequences at (\d+) tokens, (\d+) of them shared")
PROMPT = re.compile(r"prompt alone, (\d+) tokens, (\d+) % of the GPU")
TOGETHER = re.compile(r"prompts in one step, (\d+) of (\d+) tokens behind (\d+) shared, (\d+) % of the GPU")
KERNEL = re.compile(r"kernel decode ((.+) \(.+\)), ([\d.]+) MB")
ALONE = "decode step alone, "
ASKS = re.compile(r"decode step alone, (?P<batch>\d+) sequences at 1024 tokens(?:, (?P<what>\w+))?")
SAMPLER = re.compile(r"kernel sample (?P<what>.+) (?P<batch>\d+), [\d.]+ MB")
SIDES = re.compile(r"sharing, (\d+) rows of 1024 (beside prompt steps of (\d+) tokens, (.+)|alone)")
PULL = re.compile(r"handoff of (\d+) tokens \((.+) MB\), (cuda:0 to cuda:[01])")


def beside(against: str, label: str, rows: Sequence[Row]) -> TableData:
    """Make a table of decode steps, each beside a step that differs only as `against` says."""
    found: dict[str, Row] = {}
    for row in rows:
        if row.workload.startswith(ALONE) and row.compared_with == against and row.hardware == ONE_GPU:
            found[row.workload.removeprefix(ALONE)] = row
    lines: list[Line] = [(name, [own(row), other(row)]) for name, row in found.items()]
    return TableData("one H200, no server", label, ["ms a step", f"{against}, ms"], lines)


def grid(
    pattern: re.Pattern[str], figure: str, subject: str, corner: str, column: str, line: str, rows: Sequence[Row]
) -> TableData:
    """Make a table by the two numbers in workloads: the first goes down the page, the second across."""
    found = {
        (int(match[1]), int(match[2])): own(row)
        for row in rows
        if (match := pattern.fullmatch(row.workload))
        and (row.hardware, row.system, row.model, row.figure) == (ONE_GPU, "baton", MODEL, figure)
    }
    down, across = ([*sorted({key[i] for key in found})] for i in (0, 1))
    lines: list[Line] = [(line.format(first), [found.get((first, second)) for second in across]) for first in down]
    return TableData(subject, corner, [column.format(second) for second in across], lines)


def decode_kernels(rows: Sequence[Row]) -> TableData:
    """Make a table of a decode step's operations beside the read ceiling, each by its latest plan."""
    found = [(match, row) for row in rows if (match := KERNEL.fullmatch(row.workload)) and row.hardware == ONE_GPU]
    newest = {match[2]: (match[1], row) for match, row in found}
    lines: list[Line] = [
        (label, [own(row), Cell(row, 100 * row.compared_value / row.value)]) for label, row in newest.values()
    ]
    subject = "one H200, Qwen3-4B's shapes, inside a captured graph"
    return TableData(subject, "operation and sequences", ["µs", "% of the read ceiling"], lines)


def asks(rows: Sequence[Row]) -> TableData:
    """Make a table of decode steps whose rows ask for more than a token."""
    names = {
        "": "nothing more",
        "penalties": "penalties",
        "logprobs": "log-probabilities",
        "both": "both",
        "grammar": "a grammar",
    }
    found, batches = by_batch(ASKS, rows), (1, 8, 32, 64)
    lines: list[Line] = [
        (label, [found.get(name, {}).get(batch) for batch in batches]) for name, label in names.items()
    ]
    columns = [f"{batch} sequences" if batch > 1 else "1 sequence" for batch in batches]
    return TableData("ms a step; one H200, no server", "every row asks for", columns, lines)


def sampler(rows: Sequence[Row]) -> TableData:
    """Make a table of sampling times by the sampler's limits."""
    found, batches = by_batch(SAMPLER, rows), (1, 8, 64)
    lines: list[Line] = [(name, [cells.get(batch) for batch in batches]) for name, cells in found.items()]
    return TableData("µs; one H200, 151,936 logits a row", "rows", [str(batch) for batch in batches], lines)


def by_batch(pattern: re.Pattern[str], rows: Sequence[Row]) -> dict[str, dict[int, Cell]]:
    """Return the last rows of `MODEL` on a single H200, by `what` and `batch` of the workload."""
    found: dict[str, dict[int, Cell]] = {}
    for row in rows:
        match = pattern.fullmatch(row.workload)
        if match and (row.hardware, row.system, row.model) == (ONE_GPU, "baton", MODEL):
            found.setdefault(match["what"] or "", {})[int(match["batch"])] = own(row)
    return found


def pulls(rows: Sequence[Row]) -> TableData:
    """Make a table of pulls of KV blocks within a GPU and between two, by length."""
    places = {"within one": "cuda:0 to cuda:0", "between two": "cuda:0 to cuda:1"}
    figures = {"pull p50, ms": "pull_p50", "GB/s": "rate"}
    columns = [(place, figure) for place in places.values() for figure in figures.values()]
    found: dict[tuple[int, str], dict[tuple[str, str], Cell]] = {}
    for row in rows:
        if match := PULL.fullmatch(row.workload):
            found.setdefault((int(match[1]), match[2]), {})[match[3], row.figure] = own(row)
    lines: list[Line] = [
        (f"{num_tokens:,} tokens, {megabytes} MB", [cells.get(column) for column in columns])
        for (num_tokens, megabytes), cells in sorted(found.items())
    ]
    titles = [f"{place}: {figure}" for place in places for figure in figures]
    return TableData("H200s, KV of Qwen3-4B's shapes", "prompt", titles, lines)


def both_roles(rows: Sequence[Row]) -> TableData:
    """Make a table of decode steps beside prompt steps, by what prompts leave of the GPU."""
    columns = [
        "decode step, ms",
        "alone, ms",
        "prompt step, ms",
        "whole GPU alone, ms",
        "of the time one after the other, %",
    ]
    found: dict[tuple[int, int, str], dict[str, Row]] = {}
    for row in rows:
        match = SIDES.fullmatch(row.workload)
        if match and match[3] and row.hardware == ONE_GPU and row.figure in ("decode_step_p50", "prompt_step_p50"):
            found.setdefault((int(match[1]), int(match[3]), match[4]), {})[row.figure] = row
    whole = {
        int(row.workload.split(" ")[4]): row
        for row in rows
        if row.workload.endswith("tokens alone, whole GPU") and row.figure == "prompt_step_p50"
    }
    lines: list[Line] = []
    for (num_rows, num_tokens, left), told in sorted(found.items(), key=lambda each: (each[0][0], each[0][1])):
        step, prompt, alone = told["decode_step_p50"], told["prompt_step_p50"], whole[num_tokens]
        speeds = alone.value / prompt.value + step.compared_value / step.value
        cells: list[Cell | None] = [own(step), other(step), own(prompt), own(alone), Cell(prompt, 100.0 / speeds)]
        lines.append((f"{num_rows} rows beside {num_tokens:,} tokens, {left}", cells))
    return TableData("one H200, two processes, contexts of 1,024", "steps", columns, lines)
