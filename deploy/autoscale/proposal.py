"""Which worker should change its role, by how busy both roles were: a function of figures, without a clock.

Each role has **needs** and **capacities** of the same unit. Prompts need prefill workers' time: that of steps, so a
need is measured by the rate at which these workers compute these prompts now, beside whoever shares their GPU. Decode
needs rows, KV blocks and, where a longest step is wanted, time of steps. A role is **short** if it needs most of one
capacity; the other role can **spare** a worker if all of its needs would be well below what is left. Between the two
thresholds lies the hysteresis: right after a change neither role is short and can spare at once under the same load.

Workers of one role on one GPU compute one after the other's kernels, so another one there adds rows and no time; on a
CPU each brings its threads. KV blocks are the device's: a decode worker adds those of a pool in which there is none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from common.wire.messages.worker import Role
from deploy.autoscale.load import Sample, Window

SHORT = 0.85
"""From this share of a capacity on a role is short of it: with more, what comes in bunches waits."""
SPARE = 0.65
"""At most this share of each capacity may a role need that gives a worker up, once it has."""

Amounts = Mapping[str, float]
"""By name of what is needed."""
TIME, ROWS, BLOCKS, STEP = "time", "rows", "blocks", "step"


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker that serves, and what it brings."""

    name: str
    role: Role
    pool_id: int  # of its device's KV blocks: who has the same one is on the same device
    num_blocks: int  # of that pool
    most_rows: int  # of its batch, if it decodes
    num_requests: int  # that it has: who has few leaves soon
    is_ours: bool  # whether we may change it


@dataclass(frozen=True, slots=True)
class Proposal:
    """That this worker should give way to one of the other role, and why."""

    name: str
    role: Role  # of the other
    reason: str


@dataclass(frozen=True, slots=True)
class Machine:
    """What does not change while we serve."""

    is_cpu: bool
    longest_step_s: float = 0.0  # a decode step should not take longer; 0: no matter


def seats_of(sample: Sample, ours: Mapping[str, object]) -> list[Seat]:
    """Everybody who serves, `ours` among them."""
    return [
        Seat(
            worker.name,
            worker.role,
            worker.pool_id,
            worker.num_blocks,
            worker.most_rows if worker.role is Role.DECODE else 0,
            worker.num_prompts + worker.num_rows,
            worker.name in ours,
        )
        for worker in sample.serving
    ]


def propose(windows: Sequence[Window], seats: Sequence[Seat], machine: Machine) -> Proposal | None:
    """The change that helps in all of these windows, if there is one; never of the last worker of a role."""
    for role in Role:
        if all(_is_short(role, window, seats, machine) for window in windows):
            good = [seat for seat in seats if seat.is_ours and _helps(seat, role, windows, seats, machine)]
            if good:
                chosen = min(good, key=lambda seat: _order(seat, role, seats))
                return Proposal(chosen.name, role, _reason(role, windows, seats, machine))
    return None


def needs(role: Role, window: Window, seats: Sequence[Seat], machine: Machine) -> Amounts:
    """Of a role in a window in which `seats` served."""
    if role is Role.PREFILL:
        return {TIME: window.num_busy}
    pools = {seat.pool_id for seat in seats if seat.role is Role.DECODE}
    needed = {ROWS: window.num_rows, BLOCKS: sum(window.used_blocks.get(pool_id, 0.0) for pool_id in pools)}
    if machine.longest_step_s:
        needed[STEP] = window.step_s * _num_places(role, seats, machine)
    return needed


def capacities(role: Role, seats: Sequence[Seat], machine: Machine) -> Amounts:
    """Of all workers of a role."""
    num_places = float(_num_places(role, seats, machine))
    if role is Role.PREFILL:
        return {TIME: num_places}
    decodes = [seat for seat in seats if seat.role is Role.DECODE]
    pools = {seat.pool_id: seat.num_blocks for seat in decodes}
    had = {ROWS: float(sum(seat.most_rows for seat in decodes)), BLOCKS: float(sum(pools.values()))}
    if machine.longest_step_s:
        had[STEP] = machine.longest_step_s * num_places
    return had


def shares(needed: Amounts, had: Amounts) -> dict[str, float]:
    """Of each capacity, how much is needed; more than all of none."""
    return {name: amount / had[name] if had[name] else float("inf") for name, amount in needed.items()}


def _is_short(role: Role, window: Window, seats: Sequence[Seat], machine: Machine) -> bool:
    """Prompts that nobody waits for besides are no shortage: one stream keeps one worker busy, and no second one."""
    is_waited_for = role is Role.DECODE or window.num_prompts > _num_places(role, seats, machine)
    return is_waited_for and bool(_scarce(role, window, seats, machine))


def _scarce(role: Role, window: Window, seats: Sequence[Seat], machine: Machine) -> list[str]:
    """What a role needs most of."""
    needed, had = needs(role, window, seats, machine), capacities(role, seats, machine)
    return [name for name, share in shares(needed, had).items() if share >= SHORT]


def _helps(seat: Seat, role: Role, windows: Sequence[Window], seats: Sequence[Seat], machine: Machine) -> bool:
    """Whether `role` gets more of all that it is short of if that worker changes, and the other role can spare it."""
    if seat.role is role or sum(other.role is seat.role for other in seats) < 2:
        return False
    before, after = seats, [_changed(other, seats) if other is seat else other for other in seats]
    gets, has = capacities(role, after, machine), capacities(role, before, machine)
    scarce = {name for window in windows for name in _scarce(role, window, before, machine)}
    left = capacities(seat.role, after, machine)
    can_spare = all(
        max(shares(needs(seat.role, window, before, machine), left).values()) <= SPARE for window in windows
    )
    return can_spare and all(gets[name] > has[name] for name in scarce)


def _changed(seat: Seat, seats: Sequence[Seat]) -> Seat:
    """Decode workers of one system have batches of one size."""
    if seat.role is Role.DECODE:
        return replace(seat, role=Role.PREFILL, most_rows=0)
    return replace(seat, role=Role.DECODE, most_rows=max(other.most_rows for other in seats))


def _order(seat: Seat, role: Role, seats: Sequence[Seat]) -> tuple[bool, bool, int, str]:
    """Best where there is nobody of the needed role; then where another of its own stays; then who has least to do."""
    beside = [other for other in seats if other is not seat and other.pool_id == seat.pool_id]
    is_there = any(other.role is role for other in beside)
    is_last = not any(other.role is seat.role for other in beside)
    return is_there, is_last, seat.num_requests, seat.name


def _num_places(role: Role, seats: Sequence[Seat], machine: Machine) -> int:
    """How many compute at once."""
    of_role = [seat for seat in seats if seat.role is role]
    return len(of_role) if machine.is_cpu else len({seat.pool_id for seat in of_role})


# --- in words -------------------------------------------------------------------------------------


def _reason(role: Role, windows: Sequence[Window], seats: Sequence[Seat], machine: Machine) -> str:
    """The shortage first."""
    seconds = sum(window.seconds for window in windows)
    words = {Role.PREFILL: _prompts_in_words(windows, seats), Role.DECODE: _decode_in_words(windows, seats, machine)}
    return f"over {seconds:.0f} s {words[role]}; {words[role.other]}"


def _prompts_in_words(windows: Sequence[Window], seats: Sequence[Seat]) -> str:
    num_workers = sum(seat.role is Role.PREFILL for seat in seats)
    num_prompts, num_busy = _mean(windows, lambda w: w.num_prompts), _mean(windows, lambda w: w.num_busy)
    return f"{num_prompts:.0f} prompts kept {num_busy:.1f} of {num_workers} prefill workers busy"


def _decode_in_words(windows: Sequence[Window], seats: Sequence[Seat], machine: Machine) -> str:
    had = capacities(Role.DECODE, seats, machine)
    num_rows, step_s = _mean(windows, lambda w: w.num_rows), _mean(windows, lambda w: w.step_s)
    num_blocks = _mean(windows, lambda w: needs(Role.DECODE, w, seats, machine)[BLOCKS])
    wanted = f" (wanted: {machine.longest_step_s * 1e3:g})" if machine.longest_step_s else ""
    return (
        f"decode had {num_rows:.0f} sequences for {had[ROWS]:.0f} rows ({num_rows / max(1.0, had[ROWS]):.0%}), "
        f"{num_blocks / max(1.0, had[BLOCKS]):.0%} of its KV blocks, steps of {step_s * 1e3:.1f} ms{wanted}"
    )


def _mean(windows: Sequence[Window], of: Callable[[Window], float]) -> float:
    return sum(of(window) * window.seconds for window in windows) / sum(window.seconds for window in windows)
