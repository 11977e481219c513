"""Writes the workers' speed for `baton plan` from rows of results.csv: a JSON file for each GPU and model.

    python -m benchmarks.rates            # Write the files.
    python -m benchmarks.rates --check    # Exit with status 1 if a file is out of date.

Three rates are measured alone: prompts (`benchmarks.prompt_step`), decode steps (`benchmarks.decode_step`) and copies
(`benchmarks.handoff`). `benchmarks.one_long` measures the mutual slowdown of prompts and decode steps on a shared GPU.
Each other rate is the rest of a load's figure after known steps and copies.

- `request_ms`, `handoff_ms`: a lone stream's first token, and the gap after it (128/256 tokens), minus step and copy.
- `beside_prompt_ms`: a first token on a single GPU at 16 requests/s, mostly beside streams, minus `request_ms` and the
  prompt step. The step counts with the slowdown of a long prompt.
- `scattered`: attention in a step of many prompts after a long prefix, as a multiple of a long prompt's attention.
  Attention is the step's time minus the matrix products of its tokens.
- `prefix_kernel_ms`, `prefix_kernel_ms_per_1000`: decode steps that read a shared prefix once, minus a step of equally
  many read tokens. A line is fitted, by thousands of tokens not read.
- `reread`: time added by reading a shared prefix for each row. The unit is the time added by equally many unshared
  tokens; the value is a mean.
- `found_ms_per_1000`: first tokens of prompts with all but 16 tokens cached; the increase from 1,024 to 16,000 tokens.
- `whole_wait`: gaps (90th percentile) of 512 requests at once on a GPU, while prompts have the whole GPU. The rate is a
  gap minus a decode step, in parts of the prompt step.

So for such figures of such loads, the simulator reproduces measurements and predicts nothing.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import linear_regression, mean

from benchmarks.presets import settings
from benchmarks.tables.cells import MODEL, ONE_GPU, RESULTS, TWO_GPUS, newest, results
from benchmarks.tables.steps import PROMPT, PULL, SHARED, STEP, TOGETHER
from common.models.reading import decoder_config
from common.settings.config import GPU_STEP_TOKENS
from deploy.bench.results import Row
from deploy.planning.step_times.costs import MAX_KEYS, MAX_ROWS, PromptCosts, StepCosts
from deploy.planning.step_times.rates import POINTS, SHIPPED, Points, Rates, Where
from deploy.planning.step_times.shape import shape_of

H200_BYTES = 143_771 << 20
"""Memory of an H200, as nvidia-smi has it."""
H200_CAPABILITY = (9, 0)
SHARE = 80
"""Percent of a GPU for prompts beside streams in the rows of `one_long`."""
STREAMS, STREAM_TOKENS, LONG_TOKENS = (8, 32, 64), 1000, 32_000
AT_ONCE, LONE, STEADY = "at once, 1024/128, 512 requests", "concurrency 1, 128/256,", "16 req/s, 1024/128,"
SHORT_CACHED, LONG_CACHED = 1008, 15_984
LONE_TOKENS, STEP_PROMPTS, PROMPT_TOKENS, MEAN_CONTEXT = 128, 8, 1024, 1088


@dataclass(slots=True)
class _Rows:
    """Rows of results.csv, with a list of rows in use."""

    rows: Sequence[Row]
    used: list[Row] = field(default_factory=list)

    def figure(self, hardware: str, system: str, load: str, figure: str, beside: str = "") -> float:
        """Return the newest value; raises ValueError if there is none."""
        cell = newest(self.rows, hardware, system, load, figure, beside=beside)
        if cell is None:
            raise ValueError(f"no row of {hardware}, {system}, {load!r}, {figure}")
        self.used.append(cell.row)
        return cell.value

    def all(self, figure: str) -> list[float]:
        """Return the values of every load on `MODEL`."""
        return [row.value for row in self.rows
                if row.figure == figure and row.model == MODEL and row.system.startswith("baton")]  # fmt: skip

    def points(self, point_of: Callable[[Row], tuple[float, ...] | None]) -> Points:
        """Return sorted points of the newest row of each workload.

        A point begins with the numbers of its workload; measured values follow.
        """
        found: dict[str, tuple[Row, tuple[float, ...]]] = {}
        for row in self.rows:
            if (point := point_of(row)) is not None:
                found[row.workload] = row, point
        self.used += [row for row, _ in found.values()]
        return tuple(sorted(point for _, point in found.values()))

    def origin(self) -> tuple[str, ...]:
        """Return days and commits of the rows in use, oldest first."""
        return tuple(f"{date} {commit}" for date, commit in sorted({(row.date, row.commit) for row in self.used}))


def h200_qwen3_4b(rows: Sequence[Row]) -> Rates:
    """Return all rates of an H200, and of two on a host; raises ValueError if rows are missing."""
    of = _Rows(rows)
    prompts, steps, copies = of.points(_prompt), of.points(_step), of.points(_copy)
    beside_steps, beside_ms = _beside(of)
    nothing = Where(0.0, 0.0)
    rates = Rates(
        gpu="NVIDIA H200",
        capability=H200_CAPABILITY,
        memory_bytes=H200_BYTES,
        model=MODEL,
        shape=shape_of(decoder_config(settings(MODEL))),
        step_tokens=GPU_STEP_TOKENS,
        prompts=prompts,
        steps=steps,
        copies=copies,
        share=SHARE,
        beside_steps=beside_steps,
        beside_prompt=1.0,
        beside_prompt_ms=0.0,
        whole_wait=0.0,
        shared=nothing,
        apart=nothing,
        found_ms_per_1000=0.0,
        prefix_kernel_ms=0.0,
        prefix_kernel_ms_per_1000=0.0,
        scattered=1.0,
        reread=1.0,
        router_tokens_per_s=max(of.all("output_throughput")),
        origin=(),
    )
    return replace(_together(_prefixes(_filled(rates, of, beside_ms), of), of), origin=of.origin())


def _filled(rates: Rates, of: _Rows, beside_ms: float) -> Rates:
    """Add rates left over from loads after steps and copies."""
    whole, part, steps = PromptCosts(rates, 100), PromptCosts(rates, SHARE), StepCosts(rates)
    prompt_ms, step_ms = whole.prompt_ms(LONE_TOKENS), steps.ms(1, LONE_TOKENS)
    (copy_ms,) = (ms for tokens, ms in rates.copies if tokens == LONE_TOKENS)
    batch_ms = whole.ms([(PROMPT_TOKENS, 0)] * STEP_PROMPTS)
    gap_ms = of.figure(ONE_GPU, "baton", AT_ONCE, "later_gap_p90")
    wait_ms = gap_ms - steps.ms(MAX_ROWS, MAX_ROWS * MEAN_CONTEXT)

    def left(hardware: str, system: str, copied_ms: float) -> Where:
        first_ms, second_ms = (of.figure(hardware, system, LONE, name) for name in ("ttft_p50", "first_gap_p50"))
        return Where(_rounded(first_ms - prompt_ms), _rounded(second_ms - step_ms - copied_ms))

    shared, factor = left(ONE_GPU, "baton", 0.0), beside_ms / part.prompt_ms(LONG_TOKENS)
    steady_ms = of.figure(ONE_GPU, "baton", STEADY, "ttft_p50")
    short_ms, long_ms = (
        of.figure(ONE_GPU, "baton", f"concurrency 1, primed 1x{cached}+16/2,", "ttft_p50")
        for cached in (SHORT_CACHED, LONG_CACHED)
    )
    return replace(
        rates,
        beside_prompt=_rounded(factor),
        beside_prompt_ms=_rounded(steady_ms - shared.request_ms - factor * part.prompt_ms(PROMPT_TOKENS)),
        whole_wait=_rounded(wait_ms / batch_ms),
        found_ms_per_1000=_rounded(1e3 * (long_ms - short_ms) / (LONG_CACHED - SHORT_CACHED)),
        shared=shared,
        apart=left(TWO_GPUS, "baton 1P1D", copy_ms),
    )


def _prefixes(rates: Rates, of: _Rows) -> Rates:
    """Add rates of decode steps whose rows share a prefix."""
    steps, spared, added_ms, parts = StepCosts(rates), [], [], []
    for rows, context, prefix, shared_ms, each_ms in of.points(_shared):
        num_spared = (rows - 1) * prefix
        once_ms, apart_ms = (steps.ms(int(rows), rows * context - left) for left in (num_spared, 0))
        spared.append(num_spared / 1000)
        added_ms.append(shared_ms - once_ms)
        parts.append((each_ms - once_ms) / (apart_ms - once_ms))
    slope, intercept = linear_regression(spared, added_ms)
    prefix_kernel_ms, ms_per_1000, reread = map(_rounded, (intercept, slope, mean(parts)))
    return replace(rates, prefix_kernel_ms=prefix_kernel_ms, prefix_kernel_ms_per_1000=ms_per_1000, reread=reread)


def _together(rates: Rates, of: _Rows) -> Rates:
    """Add the mean factor of attention with more keys than are gathered."""
    costs = {percent: PromptCosts(rates, percent) for percent in (100, SHARE)}
    factors = [
        costs[int(percent)].scattered(int(count), int(tokens), int(before), step_ms)
        for count, tokens, before, percent, step_ms in of.points(_prompts_together)
        if count * (tokens + before) > MAX_KEYS and percent in costs
    ]
    return replace(rates, scattered=_rounded(mean(factors)))


def _beside(of: _Rows) -> tuple[Points, float]:
    """Return the gaps' slowdown beside a long prompt by number of streams, and the prompt's mean time."""
    gaps, prompts = [], []
    for count in STREAMS:
        load = f"{count} streams of {STREAM_TOKENS} tokens and one of {LONG_TOKENS}"
        alone, beside, long = (
            of.figure(ONE_GPU, "baton", load, name, beside="vllm")
            for name in ("itl_alone_p50", "itl_prefill_p50", "long_ttft")
        )
        gaps.append((float(count), _rounded(beside / alone)))
        prompts.append(long)
    return tuple(gaps), sum(prompts) / len(prompts)


def _is_ours(row: Row) -> bool:
    return (row.hardware, row.system, row.model) == (ONE_GPU, "baton", MODEL)


def _prompt(row: Row) -> tuple[float, ...] | None:
    match = PROMPT.fullmatch(row.workload)
    if not match or not _is_ours(row) or row.figure != "prompt":
        return None
    return float(match[1]), float(match[2]), row.value


def _prompts_together(row: Row) -> tuple[float, ...] | None:
    match = TOGETHER.fullmatch(row.workload)
    if not match or not _is_ours(row) or row.figure != "step":
        return None
    return *map(float, match.groups()), row.value


def _step(row: Row) -> tuple[float, ...] | None:
    match = STEP.fullmatch(row.workload)
    if not match or not _is_ours(row) or row.figure != "step":
        return None
    floor_ms = row.compared_value if row.compared_with == "read floor" else row.value
    return float(match[1]), float(match[2]), row.value, floor_ms


def _shared(row: Row) -> tuple[float, ...] | None:
    match = SHARED.fullmatch(row.workload)
    if not match or not _is_ours(row) or row.compared_with != "read for each row":
        return None
    return *map(float, match.groups()), row.value, row.compared_value


def _copy(row: Row) -> tuple[float, ...] | None:
    match = PULL.fullmatch(row.workload)
    if not match or row.figure != "pull_p50" or match[3] != "cuda:0 to cuda:1":
        return None
    return float(match[1]), row.value


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def as_json(rates: Rates) -> str:
    """Return the text of a file, a point a line."""
    text = json.dumps(asdict(rates), indent=1)
    for name in POINTS:
        rows = ",\n  ".join(json.dumps(list(point)) for point in getattr(rates, name))
        before = json.dumps({name: asdict(rates)[name]}, indent=1)[3:-2]
        text = text.replace(before, f'"{name}": [\n  {rows}\n ]')
    return text + "\n"


FILES: dict[str, Callable[[Sequence[Row]], Rates]] = {"h200-qwen3-4b": h200_qwen3_4b}


def outdated(rows: Sequence[Row], directory: Path) -> Iterable[tuple[Path, str]]:
    """Yield files to be written, with the new content."""
    for name, make in FILES.items():
        path, text = directory / f"{name}.json", as_json(make(rows))
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            yield path, text


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rates", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="rows to read")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if a file is out of date")
    args = parser.parse_args(argv)
    found = list(outdated(results(args.results), SHIPPED))
    for path, text in found:
        print(f"{path.name}: {'out of date' if args.check else 'written'}")
        if not args.check:
            path.write_text(text, encoding="utf-8")
    return 1 if args.check and found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
