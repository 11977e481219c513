"""Summary of a trace in a page: load of each process, waits of requests, and the slowest requests."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from common.base.json_file import JsonObject
from common.base.trace_events import DEVICE, LOOP
from deploy.operate.tables import BLANK, aligned, printable
from deploy.trace.merge import process_names
from deploy.trace.parts import Part, Recording, Slice

PHASES = ("read_ms", "queued_ms", "prefill_ms", "handoff_ms", "decode_ms", "ttft_ms", "e2e_ms")
"""Phases of a request, as in X-Baton-Timing."""
NUM_SLOWEST = 5
CPU_STEPS = ("launch", "local prompt")
"""Loop phases that compute a step without a device beside the host."""
PROCESS_HEAD = (
    "PROCESS", "TRACED", "STEPS", "STEP p50", "p99", "BUSY", "IDLE BETWEEN p50", "p99", "LATE", "HOST A STEP p50"
)  # fmt: skip
SLOWEST_HEAD = (
    "SLOWEST, ms", "e2e", "read", "queued", "prefill", "handoff", "decode", "PROMPT", "OUTPUT", "ATTEMPTS", "WORKERS"
)  # fmt: skip


def summary(recording: Recording) -> str:
    """Return the tables; tables without data are left out."""
    tables = [_processes(recording.parts), _requests(recording.parts), _slowest(recording.parts)]
    problems = [printable(f"left out: {problem}") for problem in recording.skipped]
    return "\n\n".join(["\n".join(lines) for lines in tables if lines] + ["\n".join(problems)] * bool(problems))


def requests(parts: Sequence[Part]) -> list[JsonObject]:
    """Return the router's records of all finished completions."""
    told = [each.args for part in parts for each in part.slices if part.role == "router" and each.name == "request"]
    kinds = {"request": str, "e2e_ms": int | float, "attempts": int}
    return [args for args in told if all(isinstance(args.get(name), kind) for name, kind in kinds.items())]


def _processes(parts: Sequence[Part]) -> list[str]:
    names = process_names(list(parts))
    return aligned([PROCESS_HEAD, *(_process(name, part) for name, part in zip(names, parts, strict=True))])


def _process(name: str, part: Part) -> tuple[str, ...]:
    begin, end = part.slices[0].ts, max(each.end for each in part.slices)
    on_device = part.on(DEVICE, "step")
    steps = on_device or [each for phase in CPU_STEPS for each in part.on(LOOP, phase) if each.args]
    took = [each.dur for each in steps]
    gaps = [after.ts - before.end for before, after in pairwise(on_device) if "late" not in after.args]
    busy = f"{sum(took) / (end - begin):.0%}" if steps and end > begin else BLANK
    return (
        name,
        f"{(end - begin) / 1e6:.1f} s",
        str(len(steps)) if steps else BLANK,
        *(_ms(took, share) for share in (0.5, 0.99)),
        busy,
        *(_us(gaps, share) for share in (0.5, 0.99)),
        str(sum("late" in each.args for each in on_device)) if on_device else BLANK,
        _us(list(_host_busy(part)), 0.5),
    )


def _host_busy(part: Part) -> Iterator[float]:
    """Yield the time of each turn of a loop, without waiting for the device."""
    waits = iter(part.on(LOOP, "wait"))
    wait: Slice | None = next(waits, None)
    for turn in part.on(LOOP, "turn"):
        waited = 0.0
        while wait is not None and wait.ts < turn.end:
            waited += wait.dur if wait.ts >= turn.ts else 0.0
            wait = next(waits, None)
        yield turn.dur - waited


def _requests(parts: Sequence[Part]) -> list[str]:
    found = requests(parts)
    if not found:
        return []
    states = Counter(str(args.get("state")) for args in found)
    replayed = sum(args.get("attempts", 1) > 1 for args in found)
    ended = ", ".join(f"{n} {printable(state)}" for state, n in states.items())
    lines = [f"{len(found)} requests: {ended}; {replayed} replayed"]
    rows: list[tuple[str, ...]] = [("PHASE", "p50", "p99", "MOST")]
    for phase in PHASES:
        values = [float(args[phase]) for args in found if isinstance(args.get(phase), int | float)]
        rows.append((phase.removesuffix("_ms"), *(f"{quantile(values, share):.1f} ms" for share in (0.5, 0.99, 1.0))))
    return lines + aligned(rows)


def _slowest(parts: Sequence[Part]) -> list[str]:
    found = sorted(requests(parts), key=lambda args: -args["e2e_ms"])[:NUM_SLOWEST]
    if not found:
        return []
    return aligned([SLOWEST_HEAD, *map(_row, found)])


def _row(args: JsonObject) -> tuple[str, ...]:
    phases = ("e2e_ms", "read_ms", "queued_ms", "prefill_ms", "handoff_ms", "decode_ms")
    counts = ("prompt_tokens", "output_tokens", "attempts")
    workers = f"{args.get('prefill_worker') or BLANK} -> {args.get('decode_worker') or BLANK}"
    times = (f"{args[name]:.1f}" if isinstance(args.get(name), int | float) else BLANK for name in phases)
    return (str(args["request"]), *times, *(str(args.get(name, BLANK)) for name in counts), workers)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the least value not below a share of the values; 0 without values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def _ms(values_us: Sequence[float], share: float) -> str:
    return f"{quantile(values_us, share) / 1e3:.2f} ms" if values_us else BLANK


def _us(values_us: Sequence[float], share: float) -> str:
    return f"{quantile(values_us, share):.1f} us" if values_us else BLANK
