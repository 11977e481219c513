"""Summary of a trace: steps and load of each process."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from common.base.trace_events import DEVICE, LOOP
from common.device.steps.loop_trace import WAIT
from deploy.operate.tables import BLANK, aligned, printable
from deploy.trace.parts import Part, Slice

CPU_STEPS = ("launch", "local prompt")
"""Loop phases that compute a step without a device beside the host."""
HEAD = (
    "PROCESS", "TRACED", "STEPS", "STEP p50", "p99", "BUSY", "IDLE BETWEEN p50", "p99", "LATE", "HOST A STEP p50"
)  # fmt: skip


def summary(parts: Sequence[Part], problems: Sequence[str]) -> str:
    """Return a table of processes, and what was left out."""
    return "\n".join(
        [*aligned([HEAD, *map(_row, parts)]), *(printable(f"left out: {problem}") for problem in problems)]
    )


def _row(part: Part) -> tuple[str, ...]:
    traced_ns = max(each.end_ns for each in part.slices) - part.slices[0].begin_ns
    on_device = part.on(DEVICE, "step")
    steps = on_device or [each for phase in CPU_STEPS for each in part.on(LOOP, phase) if each.args]
    took = [each.dur_ns for each in steps]
    gaps = [after.begin_ns - before.end_ns for before, after in pairwise(on_device) if "late" not in (after.args or {})]
    return (
        part.name,
        f"{traced_ns / 1e9:.1f} s",
        str(len(steps)) if steps else BLANK,
        *(_quantile(took, share, 1e6, ".2f", "ms") for share in (0.5, 0.99)),
        f"{sum(took) / traced_ns:.0%}" if steps and traced_ns else BLANK,
        *(_quantile(gaps, share, 1e3, ".1f", "us") for share in (0.5, 0.99)),
        str(sum("late" in (each.args or {}) for each in on_device)) if on_device else BLANK,
        _quantile(list(_host_busy_ns(part)), 0.5, 1e3, ".1f", "us"),
    )


def _host_busy_ns(part: Part) -> Iterator[int]:
    """Yield the time of each turn of a loop, without waiting for the device."""
    waits = iter(part.on(LOOP, WAIT))
    wait: Slice | None = next(waits, None)
    for turn in part.on(LOOP, "turn"):
        waited_ns = 0
        while wait is not None and wait.begin_ns < turn.end_ns:
            waited_ns += wait.dur_ns if wait.begin_ns >= turn.begin_ns else 0
            wait = next(waits, None)
        yield turn.dur_ns - waited_ns


def _quantile(values_ns: Sequence[int], share: float, ns_a_unit: float, form: str, unit: str) -> str:
    """Format the least value not below a share of the values; blank without values."""
    if not values_ns:
        return BLANK
    value_ns = sorted(values_ns)[min(len(values_ns) - 1, int(share * len(values_ns)))]
    return f"{value_ns / ns_a_unit:{form}} {unit}"
