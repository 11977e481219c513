"""Choice of the worker to change its role, by the load of both roles: a function of figures, without a clock.

Each role has **needs** and **capacities** of equal units. Prompts need step time of prefill workers, measured at the
present speed, which includes slowdown by neighbours on the GPU. Decode needs rows, KV blocks and, with a limit on
steps, step time. A role is **short** if a need takes most of a capacity. The other role can **spare** a worker if all
needs are well below the remaining capacity. The gap between both thresholds is a hysteresis: right after a change, no
role is short while the other can spare a worker.

Workers of a role on a single GPU run kernels in turn, so another worker there adds rows but no time. On a CPU each
worker adds threads. KV blocks belong to the device: a decode worker adds blocks only on a device without a decode
worker.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from common.wire.messages.operator import WorkerLoad
from common.wire.messages.worker import Role
from deploy.autoscale.load import Window

SHORT = 0.85
"""Share of a capacity from which a role is short, because bursts then wait."""
SPARE = 0.65
"""Largest share of each remaining capacity for a role that gives up a worker."""

Amounts = Mapping[str, float]
"""Amounts by the name of the resource."""
TIME, ROWS, BLOCKS, STEP = "time", "rows", "blocks", "step"


@dataclass(frozen=True, slots=True)
class Proposal:
    """A worker to be replaced by a worker of the other role, with the reason."""

    name: str
    role: Role  # the new role
    reason: str


@dataclass(frozen=True, slots=True)
class Machine:
    """Properties constant while serving."""

    is_cpu: bool
    longest_step_s: float = 0.0  # limit of a decode step; 0: none


def propose(
    windows: Sequence[Window], workers: Sequence[WorkerLoad], ours: Collection[str], machine: Machine
) -> Proposal | None:
    """Return the change of one of ours that helps in all windows, if any; never changes the last worker of a role.

    Args:
        workers: all serving workers.
        ours: names of those that may be changed.
    """
    for role in Role:
        if all(_is_short(role, window, workers, machine) for window in windows):
            good = [each for each in workers if each.name in ours and _helps(each, role, windows, workers, machine)]
            if good:
                chosen = min(good, key=lambda worker: _order(worker, role, workers))
                return Proposal(chosen.name, role, _reason(role, windows, workers, machine))
    return None


def needs(role: Role, window: Window, workers: Sequence[WorkerLoad], machine: Machine) -> Amounts:
    """Return the needs of a role in a window in which `workers` served."""
    if role is Role.PREFILL:
        return {TIME: window.num_busy}
    pools = {worker.pool_id for worker in workers if worker.role is Role.DECODE}
    needed = {ROWS: window.num_rows, BLOCKS: sum(window.used_blocks.get(pool_id, 0.0) for pool_id in pools)}
    if machine.longest_step_s:
        needed[STEP] = window.step_s * _num_places(role, workers, machine)
    return needed


def capacities(role: Role, workers: Sequence[WorkerLoad], machine: Machine) -> Amounts:
    """Return the capacities of all workers of a role."""
    num_places = float(_num_places(role, workers, machine))
    if role is Role.PREFILL:
        return {TIME: num_places}
    decodes = [worker for worker in workers if worker.role is Role.DECODE]
    pools = {worker.pool_id: worker.num_blocks for worker in decodes}
    had = {ROWS: float(sum(worker.most_rows for worker in decodes)), BLOCKS: float(sum(pools.values()))}
    if machine.longest_step_s:
        had[STEP] = machine.longest_step_s * num_places
    return had


def shares(needed: Amounts, had: Amounts) -> dict[str, float]:
    """Return the needed share of each capacity; infinite if the capacity is 0."""
    return {name: amount / had[name] if had[name] else float("inf") for name, amount in needed.items()}


def _is_short(role: Role, window: Window, workers: Sequence[WorkerLoad], machine: Machine) -> bool:
    """Tell whether a role is short of a capacity and requests wait.

    A single stream keeps a prefill worker busy but cannot use a second, so prompts without others waiting do not count.
    """
    is_waited_for = role is Role.DECODE or window.num_prompts > _num_places(role, workers, machine)
    return is_waited_for and bool(_scarce(role, window, workers, machine))


def _scarce(role: Role, window: Window, workers: Sequence[WorkerLoad], machine: Machine) -> list[str]:
    """Return the names of the capacities of which a role needs most."""
    needed, had = needs(role, window, workers, machine), capacities(role, workers, machine)
    return [name for name, share in shares(needed, had).items() if share >= SHORT]


def _helps(
    worker: WorkerLoad, role: Role, windows: Sequence[Window], workers: Sequence[WorkerLoad], machine: Machine
) -> bool:
    """Tell whether changing a worker adds to every scarce capacity of `role`, and the other role can spare it."""
    if worker.role is role or sum(other.role is worker.role for other in workers) < 2:
        return False
    before, after = workers, [_changed(other, workers) if other is worker else other for other in workers]
    gets, has = capacities(role, after, machine), capacities(role, before, machine)
    scarce = {name for window in windows for name in _scarce(role, window, before, machine)}
    left = capacities(worker.role, after, machine)
    can_spare = all(
        max(shares(needs(worker.role, window, before, machine), left).values()) <= SPARE for window in windows
    )
    return can_spare and all(gets[name] > has[name] for name in scarce)


def _changed(worker: WorkerLoad, workers: Sequence[WorkerLoad]) -> WorkerLoad:
    """Return the worker in the other role; decode workers of a system have batches of equal size."""
    if worker.role is Role.DECODE:
        return replace(worker, role=Role.PREFILL)
    most_rows = max((other.most_rows for other in workers if other.role is Role.DECODE), default=0)
    return replace(worker, role=Role.DECODE, most_rows=most_rows)


def _order(worker: WorkerLoad, role: Role, workers: Sequence[WorkerLoad]) -> tuple[bool, bool, int, str]:
    """Sort key of candidates: first devices without a worker of `role`, then with another of the old role, then few
    requests.
    """
    beside = [other for other in workers if other is not worker and other.pool_id == worker.pool_id]
    is_there = any(other.role is role for other in beside)
    is_last = not any(other.role is worker.role for other in beside)
    return is_there, is_last, worker.num_prompts + worker.num_rows, worker.name


def _num_places(role: Role, workers: Sequence[WorkerLoad], machine: Machine) -> int:
    """Return the number of workers that compute at once."""
    of_role = [worker for worker in workers if worker.role is role]
    return len(of_role) if machine.is_cpu else len({worker.pool_id for worker in of_role})


# --- in words -------------------------------------------------------------------------------------


def _reason(role: Role, windows: Sequence[Window], workers: Sequence[WorkerLoad], machine: Machine) -> str:
    """Return the reason in words, the shortage first."""
    seconds = sum(window.seconds for window in windows)
    words = {
        Role.PREFILL: _prompts_in_words(windows, workers),
        Role.DECODE: _decode_in_words(windows, workers, machine),
    }
    return f"over {seconds:.0f} s {words[role]}; {words[role.other]}"


def _prompts_in_words(windows: Sequence[Window], workers: Sequence[WorkerLoad]) -> str:
    num_workers = sum(worker.role is Role.PREFILL for worker in workers)
    num_prompts, num_busy = _mean(windows, lambda w: w.num_prompts), _mean(windows, lambda w: w.num_busy)
    return f"{num_prompts:.0f} prompts kept {num_busy:.1f} of {num_workers} prefill workers busy"


def _decode_in_words(windows: Sequence[Window], workers: Sequence[WorkerLoad], machine: Machine) -> str:
    had = capacities(Role.DECODE, workers, machine)
    num_rows, step_s = _mean(windows, lambda w: w.num_rows), _mean(windows, lambda w: w.step_s)
    num_blocks = _mean(windows, lambda w: needs(Role.DECODE, w, workers, machine)[BLOCKS])
    wanted = f" (wanted: {machine.longest_step_s * 1e3:g})" if machine.longest_step_s else ""
    return (
        f"decode had {num_rows:.0f} sequences for {had[ROWS]:.0f} rows ({num_rows / max(1.0, had[ROWS]):.0%}), "
        f"{num_blocks / max(1.0, had[BLOCKS]):.0%} of its KV blocks, steps of {step_s * 1e3:.1f} ms{wanted}"
    )


def _mean(windows: Sequence[Window], of: Callable[[Window], float]) -> float:
    return sum(of(window) * window.seconds for window in windows) / sum(window.seconds for window in windows)
