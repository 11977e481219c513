"""When workers change roles, by made-up loads second by second: no processes, no clock."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from common.wire.messages.operator import LoadReport, WorkerLoad
from common.wire.messages.worker import Role
from deploy.autoscale.judge import LEAST_RETRY_S, LONGEST_PAUSE_S, NUM_WINDOWS, Judge, Pace
from deploy.autoscale.load import Sample, Window, measured
from deploy.autoscale.proposal import SHORT, Machine, Proposal, capacities, needs, propose, shares
from deploy.processes.placement import Gpu, Placement, Staff, in_either_role, place_standbys, place_workers

ROWS, BLOCKS = 256, 10_000
CPU, GPUS = Machine(is_cpu=True), Machine(is_cpu=False)
PACE = Pace(window_s=10.0, cooldown_s=120.0)
SHIFT_S = NUM_WINDOWS * PACE.window_s


@dataclass(frozen=True)
class Demand:
    """What a load needs: prefill workers' time, prompts at a time, rows, blocks of all pools, seconds of a step."""

    prompts: float = 0.0
    num_prompts: int = 0
    rows: int = 0
    blocks: float = 0.0
    step_s: float = 0.01


IDLE = Demand()
PROMPTS = Demand(prompts=3.0, num_prompts=40, rows=20)
REPLIES = Demand(prompts=0.2, num_prompts=1, rows=500)


@dataclass
class Fleet:
    """Workers that do what is demanded as far as they can, and change when the judge says so."""

    num_prefill: int = 2
    num_decode: int = 2
    num_gpus: int = 0
    machine: Machine = CPU
    pace: Pace = PACE
    tick_s: float = 1.0  # between two samples
    now_s: float = 0.0
    changes: list[tuple[float, Proposal]] = field(default_factory=list)

    def __post_init__(self) -> None:
        gpus = [Gpu(index, 0) for index in range(self.num_gpus)]
        self.staff = Staff.of(place_workers(self.num_prefill, self.num_decode, gpus))
        self.judge = Judge(self.pace, self.machine)
        self.busy_s = dict.fromkeys(self.staff.workers, 0.0)
        self.num_steps = dict.fromkeys(self.staff.workers, 0)
        self.epochs = dict.fromkeys(self.staff.workers, 1)

    def of(self, role: Role) -> list[Placement]:
        return [each for each in self.staff.workers.values() if each.role is role]

    def passed(self, demand: Demand) -> Sample:
        """Some time passes; how everybody is then."""
        self.now_s += self.tick_s
        prefills, decodes = self.of(Role.PREFILL), self.of(Role.DECODE)
        for each in prefills:
            self.busy_s[each.name] += self.tick_s * min(1.0, demand.prompts / len(prefills))
        for each in decodes if demand.rows else []:
            self.num_steps[each.name] += round(self.tick_s / demand.step_s)
            self.busy_s[each.name] += self.tick_s
        loads = [self._load(each, demand, len(prefills), len(decodes)) for each in (*prefills, *decodes)]
        return Sample(self.now_s, LoadReport(0, tuple(loads)))

    def _load(self, each: Placement, demand: Demand, num_prefill: int, num_decode: int) -> WorkerLoad:
        is_decode = each.role is Role.DECODE
        return WorkerLoad(
            name=each.name,
            incarnation=self.epochs[each.name],
            role=each.role,
            pid=1,
            is_serving=True,
            has_spoken=True,
            num_partners=1,
            num_prompts=0 if is_decode else round(demand.num_prompts / num_prefill),
            num_rows=round(demand.rows / num_decode) if is_decode else 0,
            most_rows=ROWS if is_decode else 64,
            pool_id=0 if each.gpu is None else each.gpu.index,
            num_blocks=BLOCKS,
            num_used_blocks=round(demand.blocks * BLOCKS / num_decode) if is_decode else 0,
            num_steps=self.num_steps[each.name],
            step_us=round(1e6 * self.busy_s[each.name]),
        )

    def run(self, demand: Demand, seconds: float, edit: Callable[[Sample], Sample | None] = lambda s: s) -> "Fleet":
        """So long under this load; whoever should change does so within four seconds."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            proposal = self.judge.add(edit(self.passed(demand)), self.staff.workers)
            if proposal is not None:
                self.changes.append((self.now_s, proposal))
                self.change(proposal)
        return self

    def change(self, proposal: Proposal) -> None:
        self.staff, new = self.staff.changed(proposal.name, proposal.role, ())
        for counts in (self.busy_s, self.num_steps):
            counts.pop(proposal.name)
            counts[new.name] = 0
        self.epochs[new.name] = self.epochs.get(new.name, 0) + 1
        self.now_s += 4.0
        self.judge.ended(self.now_s, proposal.role, done=True)

    @property
    def names(self) -> set[str]:
        return set(self.staff.workers)


def test_prompts_that_keep_all_prefill_workers_busy_get_a_decode_worker_that_is_not_needed() -> None:
    fleet = Fleet().run(PROMPTS, SHIFT_S + 1)
    [(at_s, proposal)] = fleet.changes
    assert at_s == SHIFT_S + 1  # the first window begins with the first sample
    assert (proposal.name, proposal.role) == ("decode-0", Role.PREFILL)
    assert proposal.reason == (
        "over 30 s 40 prompts kept 2.0 of 2 prefill workers busy; "
        "decode had 20 sequences for 512 rows (4%), 0% of its KV blocks, steps of 10.0 ms"
    )
    assert fleet.names == {"prefill-0", "prefill-1", "prefill-2", "decode-1"}


def test_full_decode_workers_get_a_prefill_worker_that_is_not_needed_and_never_the_last() -> None:
    fleet = Fleet().run(REPLIES, SHIFT_S + 1)
    [(_, proposal)] = fleet.changes
    assert (proposal.name, proposal.role) == ("prefill-0", Role.DECODE)
    assert proposal.reason.startswith("over 30 s decode had 500 sequences for 512 rows (98%)")
    fleet.run(replace(REPLIES, rows=2000), 3600)
    assert len(fleet.changes) == 1 and len(fleet.of(Role.PREFILL)) == 1


def test_names_come_back_so_that_no_more_of_them_come_up_than_there_are_workers() -> None:
    fleet = Fleet(pace=replace(PACE, cooldown_s=0.0))
    seen = set[str]()
    for _ in range(20):
        for demand in (PROMPTS, REPLIES):
            fleet.run(demand, 200)
            seen |= fleet.names
    assert len(fleet.changes) > 20
    assert seen <= {f"{role}-{n}" for role in ("prefill", "decode") for n in range(4)}


@pytest.mark.parametrize(
    "demand",
    [
        IDLE,
        Demand(prompts=1.3, num_prompts=3, rows=200),  # both have enough
        Demand(prompts=2.0, num_prompts=40, rows=500),  # both have too little
        Demand(prompts=2.0, num_prompts=40, rows=180),  # decode could spare none: 180 of 256 rows is too full
        Demand(prompts=0.7, num_prompts=1, rows=500),  # nor prefill: 70 % of the worker that would stay
    ],
)
def test_a_load_that_another_mix_does_not_serve_better_changes_nothing(demand: Demand) -> None:
    assert not Fleet().run(demand, 600).changes


def test_one_stream_keeps_a_worker_busy_and_a_second_one_would_not_help() -> None:
    one = Demand(prompts=0.99, num_prompts=1, rows=1)
    assert not Fleet(1, 3).run(one, 600).changes
    assert Fleet(1, 3).run(replace(one, num_prompts=2), 600).changes, "for two it would"


def test_a_step_that_took_longer_than_the_window_keeps_one_worker_busy() -> None:
    fleet = Fleet()
    samples = [fleet.passed(IDLE)]
    fleet.busy_s["prefill-0"] += 30.0
    samples += [fleet.passed(IDLE) for _ in range(10)]
    assert measured(samples).num_busy == 1.0


def test_a_burst_changes_nothing_and_neither_does_what_alternates_faster_than_windows_agree() -> None:
    fleet = Fleet()
    for _ in range(10):
        fleet.run(PROMPTS, SHIFT_S - PACE.window_s).run(IDLE, PACE.window_s)
        fleet.run(REPLIES, SHIFT_S - PACE.window_s).run(IDLE, PACE.window_s)
    for _ in range(20):
        fleet.run(PROMPTS, 15).run(REPLIES, 15)
    assert not fleet.changes


def test_a_load_that_flips_again_and_again_is_followed_ever_more_slowly() -> None:
    fleet, hours = Fleet(tick_s=5.0), 24
    for _ in range(hours * 3600 // 400):
        fleet.run(PROMPTS, 200).run(REPLIES, 200)
    gaps = [later - sooner for (sooner, _), (later, _) in pairwise(fleet.changes)]
    assert len(fleet.changes) < hours + 10, "at most one an hour, once the pause has grown"
    assert min(gaps) >= PACE.cooldown_s and max(gaps) <= LONGEST_PAUSE_S + 400 + SHIFT_S + 10


@pytest.mark.medium
def test_a_load_that_flips_by_day_and_night_is_followed_each_time() -> None:
    fleet, half_s = Fleet(tick_s=5.0), 4 * 3600
    for _ in range(4):
        fleet.run(PROMPTS, half_s)
        assert len(fleet.of(Role.PREFILL)) == 3
        fleet.run(REPLIES, half_s)
        assert len(fleet.of(Role.DECODE)) == 3
    assert all(at_s % half_s < 600 for at_s, _ in fleet.changes), "soon after each flip"


# --- figures that are not there -------------------------------------------------------------------


def silent(_: Sample) -> None:
    return None


def without(name: str) -> Callable[[Sample], Sample]:
    """As if a worker were dead."""
    return lambda sample: edited(sample, lambda load: None if load.name == name else load)


def changed(name: str, **fields: bool) -> Callable[[Sample], Sample]:
    return lambda sample: edited(sample, lambda load: structs.replace(load, **fields) if load.name == name else load)


def edited(sample: Sample, edit: Callable[[WorkerLoad], WorkerLoad | None]) -> Sample:
    workers = tuple(load for each in sample.report.workers if (load := edit(each)) is not None)
    return replace(sample, report=structs.replace(sample.report, workers=workers))


@pytest.mark.parametrize(
    "edit",
    [
        silent,
        without("decode-1"),
        changed("decode-1", is_serving=False),
        changed("decode-1", has_spoken=False),
        lambda sample: edited(sample, lambda load: load if load.role is Role.PREFILL else None),
        lambda sample: edited(sample, lambda load: load if load.role is Role.DECODE else None),
        lambda sample: edited(sample, lambda load: None),
    ],
    ids=["no router", "one is dead", "one leaves", "one has not spoken", "no decode", "no prefill", "nobody"],
)
def test_without_figures_of_all_workers_nothing_changes_and_windows_begin_anew(
    edit: Callable[[Sample], Sample | None],
) -> None:
    fleet = Fleet().run(PROMPTS, SHIFT_S - 5).run(PROMPTS, 300, edit)
    assert not fleet.changes
    fleet.run(PROMPTS, SHIFT_S)
    assert not fleet.changes, "what was seen before does not count"
    assert fleet.run(PROMPTS, 2).changes


def test_a_worker_that_was_started_again_begins_windows_anew() -> None:
    fleet = Fleet().run(PROMPTS, SHIFT_S)
    fleet.epochs["decode-1"] += 1
    assert not fleet.run(PROMPTS, SHIFT_S).changes
    assert fleet.run(PROMPTS, 1).changes


def test_workers_that_others_run_count_and_are_never_changed() -> None:
    fleet = Fleet()
    ours = {name: placement for name, placement in fleet.staff.workers.items() if name != "decode-0"}
    names = set()
    for _ in range(int(SHIFT_S) + 1):
        proposal = fleet.judge.add(fleet.passed(PROMPTS), ours)
        names |= {proposal.name} if proposal else set()
    assert names == {"decode-1"}


def test_a_change_that_failed_is_not_tried_again_at_once_and_each_time_later() -> None:
    judge = Judge(PACE, CPU)
    pauses = [judge.ended(1000.0 * n, Role.DECODE, done=False) for n in range(7)]
    assert pauses == [240, 480, 960, 1920, 3600, 3600, 3600]
    assert judge.ended(1e6, Role.DECODE, done=True) == PACE.cooldown_s


@pytest.mark.parametrize("cooldown_s", [0.0, 1.0])
def test_without_a_pause_between_changes_there_is_one_after_a_failure(cooldown_s: float) -> None:
    fleet = Fleet(pace=replace(PACE, cooldown_s=cooldown_s))
    judge = fleet.judge
    assert [judge.ended(n, Role.PREFILL, done=False) for n in range(4)] == [LEAST_RETRY_S * 2**n for n in range(4)]
    assert judge.ended(4.0, Role.PREFILL, done=True) == cooldown_s, "it went well, so no more is wanted"
    assert judge.ended(fleet.now_s, Role.PREFILL, done=False) == LEAST_RETRY_S
    assert not fleet.run(PROMPTS, LEAST_RETRY_S - 1).changes
    assert fleet.run(PROMPTS, SHIFT_S).changes


# --- GPUs -----------------------------------------------------------------------------------------


def test_on_gpus_who_changes_is_on_one_where_the_needed_role_is_missing() -> None:
    fleet = Fleet(2, 2, num_gpus=4, machine=GPUS).run(PROMPTS, SHIFT_S + 1)
    assert [proposal.name for _, proposal in fleet.changes] == ["decode-0"]  # alone on its GPU
    fleet = Fleet(1, 2, num_gpus=2, machine=GPUS)  # prefill-0 and decode-1 share GPU 0
    fleet.run(replace(PROMPTS, prompts=2.0), SHIFT_S + 1)
    assert [(p.name, p.role) for _, p in fleet.changes] == [("decode-0", Role.PREFILL)]
    assert fleet.staff.workers["prefill-1"].gpu == Gpu(1, 0)
    fleet.run(replace(REPLIES, rows=250), PACE.cooldown_s + SHIFT_S + 20)
    assert [(p.name, p.role) for _, p in fleet.changes[1:]] == [("prefill-1", Role.DECODE)]


def test_a_second_prefill_worker_on_a_gpu_computes_nothing_more_but_a_decode_worker_brings_rows() -> None:
    assert not Fleet(2, 2, num_gpus=2, machine=GPUS).run(PROMPTS, 600).changes
    assert not Fleet(1, 2, num_gpus=1, machine=GPUS).run(PROMPTS, 600).changes
    fleet = Fleet(2, 2, num_gpus=2, machine=GPUS).run(replace(REPLIES, rows=800), 600)
    assert [proposal.role for _, proposal in fleet.changes] == [Role.DECODE]


def test_kv_blocks_that_run_short_want_a_pool_in_which_nobody_decodes() -> None:
    demand = replace(REPLIES, rows=10, blocks=1.9)  # of two pools
    assert not Fleet(2, 2, num_gpus=2, machine=GPUS).run(demand, 600).changes
    fleet = Fleet(2, 2, num_gpus=4, machine=GPUS).run(demand, 600)
    assert [(p.name, p.role) for _, p in fleet.changes] == [("prefill-0", Role.DECODE)]


def test_decode_does_not_give_up_a_pool_that_it_needs() -> None:
    demand = replace(PROMPTS, rows=10, blocks=0.7)  # 70 % of the one that would be left
    assert not Fleet(2, 2, num_gpus=4, machine=GPUS).run(demand, 600).changes
    assert Fleet(2, 2, num_gpus=4, machine=GPUS).run(replace(demand, blocks=0.6), 600).changes


def test_steps_may_be_told_to_be_short() -> None:
    wanted = replace(GPUS, longest_step_s=0.02)
    slow = Demand(prompts=0.2, num_prompts=1, rows=100, step_s=0.02)
    assert not Fleet(2, 2, num_gpus=4, machine=GPUS).run(slow, 600).changes
    fleet = Fleet(2, 2, num_gpus=4, machine=wanted).run(slow, SHIFT_S + 1)
    assert "steps of 20.0 ms (wanted: 20)" in fleet.changes[0][1].reason
    assert not Fleet(2, 2, num_gpus=2, machine=wanted).run(slow, 600).changes, "a second one there makes none shorter"
    busy = replace(slow, prompts=3.0, num_prompts=40, step_s=0.01)  # would be 20 ms with one decode worker
    assert not Fleet(2, 2, num_gpus=4, machine=wanted).run(busy, 600).changes


# --- any load -------------------------------------------------------------------------------------

demands = st.builds(
    Demand,
    prompts=st.floats(0, 8),
    num_prompts=st.integers(0, 60),
    rows=st.integers(0, 1600),
    blocks=st.floats(0, 6),
    step_s=st.floats(0.001, 1.0),
)
fleets = st.builds(
    lambda num_prefill, num_decode, num_gpus: Fleet(
        num_prefill, num_decode, num_gpus, GPUS if num_gpus else CPU, tick_s=5.0
    ),
    num_prefill=st.integers(1, 4),
    num_decode=st.integers(1, 4),
    num_gpus=st.integers(0, 6),
)


@pytest.mark.medium
@settings(max_examples=40)
@given(fleet=fleets, demand=demands)
def test_under_a_constant_load_nothing_is_changed_back(fleet: Fleet, demand: Demand) -> None:
    fleet.run(demand, 1800)
    assert len({proposal.role for _, proposal in fleet.changes}) <= 1
    assert len(fleet.changes) < len(fleet.names)


@settings(max_examples=40)
@given(fleet=fleets, loads=st.lists(st.tuples(demands, st.integers(1, 300)), max_size=12))
def test_under_any_load_one_of_each_role_stays_and_pauses_hold(fleet: Fleet, loads: list[tuple[Demand, int]]) -> None:
    num_workers = len(fleet.names)
    for demand, seconds in loads:
        fleet.run(demand, seconds)
        assert fleet.of(Role.PREFILL) and fleet.of(Role.DECODE) and len(fleet.names) == num_workers
    assert all(later - sooner >= PACE.cooldown_s for (sooner, _), (later, _) in pairwise(fleet.changes))


def some_seats() -> Iterator[list[WorkerLoad]]:
    for num_pools in (1, 2, 3):
        for roles in ("PD", "PPD", "PDD", "PPDD", "PDDD", "PPPD"):
            kinds = [Role.PREFILL if each == "P" else Role.DECODE for each in roles]
            yield [
                WorkerLoad(
                    name=f"w{n}", incarnation=1, role=role, pid=1, is_serving=True, has_spoken=True, num_partners=1,
                    num_prompts=n, num_rows=0, most_rows=ROWS if role is Role.DECODE else 9999, pool_id=n % num_pools,
                    num_blocks=BLOCKS, num_used_blocks=0, num_steps=0, step_us=0,
                )
                for n, role in enumerate(kinds)
            ]  # fmt: skip


SHARES = (0.0, 0.3, 0.64, 0.66, 0.84, 0.86, 1.0, 3.0)


@pytest.mark.parametrize("machine", [CPU, GPUS, replace(CPU, longest_step_s=0.02), replace(GPUS, longest_step_s=0.02)])
def test_whatever_is_proposed_takes_from_who_has_too_much_and_gives_to_who_has_too_little(machine: Machine) -> None:
    num_proposals = 0
    for seats in some_seats():
        had = {role: capacities(role, seats, machine) for role in Role}
        pools = {seat.pool_id for seat in seats}
        for busy in SHARES:
            for rows in SHARES:
                for blocks in (0.1, 0.9):
                    window = Window(
                        10.0, 40.0, busy * had[Role.PREFILL]["time"], rows * had[Role.DECODE]["rows"],
                        dict.fromkeys(pools, blocks * BLOCKS), 0.01,
                    )  # fmt: skip
                    proposal = propose([window] * NUM_WINDOWS, seats, [seat.name for seat in seats], machine)
                    if proposal is not None:
                        num_proposals += 1
                        check(proposal, window, seats, machine)
    assert num_proposals > 50


def check(proposal: Proposal, window: Window, seats: list[WorkerLoad], machine: Machine) -> None:
    [old] = [seat for seat in seats if seat.name == proposal.name]
    assert old.role is proposal.role.other
    assert sum(seat.role is old.role for seat in seats) > 1
    new = structs.replace(old, role=proposal.role, most_rows=ROWS)
    after = [new if seat is old else seat for seat in seats]
    before = share_of(proposal.role, window, seats, seats, machine)
    assert max(before.values()) >= SHORT
    relieved = share_of(proposal.role, window, seats, after, machine)
    assert all(relieved[name] < share for name, share in before.items() if share >= SHORT)
    assert max(share_of(old.role, window, seats, after, machine).values()) < SHORT


def share_of(
    role: Role, window: Window, now: list[WorkerLoad], then: list[WorkerLoad], machine: Machine
) -> Mapping[str, float]:
    """Of what a role would have `then`, what it needs `now`."""
    return shares(needs(role, window, now, machine), capacities(role, then, machine))


# --- who is to run --------------------------------------------------------------------------------


def test_standbys_follow_the_workers_that_they_stand_by_for() -> None:
    gpus = [Gpu(0, 0), Gpu(1, 0)]
    workers = place_workers(2, 2, gpus)
    staff = Staff.of([*workers, *place_standbys(workers, [Role.DECODE])])
    assert standbys(staff) == {("decode-standby-0", 0, 1), ("decode-standby-1", 1, 1)}
    staff, new = staff.changed("decode-0", Role.PREFILL, {"prefill-2"})
    assert (new.name, new.gpu) == ("prefill-3", gpus[0])
    assert standbys(staff) == {("decode-standby-1", 1, 1)}
    staff, _ = staff.changed("prefill-1", Role.DECODE, ())
    assert standbys(staff) == {("decode-standby-1", 1, 2)}
    staff, _ = staff.changed("prefill-3", Role.DECODE, ())
    assert standbys(staff) == {("decode-standby-0", 0, 1), ("decode-standby-1", 1, 2)}


def standbys(staff: Staff) -> set[tuple[str, int, int]]:
    return {(each.name, each.gpu.index, each.standby) for each in staff.standbys if each.gpu}


@pytest.mark.parametrize("num_gpus", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("roles", [(), (Role.DECODE,), tuple(Role)])
def test_in_no_change_are_there_more_workers_on_a_device_than_its_pool_leaves_room_for(
    num_gpus: int, roles: tuple[Role, ...]
) -> None:
    gpus = [Gpu(index, 0) for index in range(num_gpus)]
    for num_prefill, num_decode in product(range(1, 4), repeat=2):
        workers = place_workers(num_prefill, num_decode, gpus)
        first = Staff.of([*workers, *place_standbys(workers, roles)])
        room = on_devices(in_either_role([*workers, *first.standbys]))
        seen, to_see = set[frozenset[Placement]](), [first]
        while to_see:
            staff = to_see.pop()
            if (state := frozenset(replace(each, name="") for each in staff.workers.values())) in seen:
                continue
            seen.add(state)
            for name, old in staff.workers.items():
                if sum(each.role is old.role for each in staff.workers.values()) > 1:
                    after, new = staff.changed(name, old.role.other, ())
                    for now in (staff, after):  # standbys move while both are there
                        assert on_devices([*staff.workers.values(), new, *now.standbys]) <= room
                    to_see.append(after)


def on_devices(placements: Sequence[Placement]) -> Counter[tuple[Role, str]]:
    return Counter((each.role, each.device) for each in placements)
