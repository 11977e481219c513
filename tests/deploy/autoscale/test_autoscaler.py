"""Changes of roles with stand-ins for all programs: what runs meanwhile, and after whatever comes in between."""

import asyncio
import contextlib
import io
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest

from common.wire.messages.operator import LoadReport, Stage, WorkerLoad
from common.wire.messages.worker import Role
from deploy.autoscale import autoscaler
from deploy.autoscale.autoscaler import Autoscaler, Plan
from deploy.autoscale.judge import Judge, Pace
from deploy.autoscale.load import Sample
from deploy.autoscale.proposal import Machine, Proposal
from deploy.processes.console import Console
from deploy.processes.keeper import Deadlines
from deploy.processes.launch_plan import ProcessSpec
from deploy.processes.placement import Placement, Staff, place_standbys, place_workers
from deploy.processes.supervisor import Supervisor
from tests.support import stand_ins
from tests.support.stand_ins import DEADLINE_S, eventually, is_alive, kind_of, running

BEFORE = {"prefill-0", "prefill-1", "decode-0", "decode-1"}
AFTER = {"prefill-0", "decode-0", "decode-1", "decode-2"}


class Scene(stand_ins.Stage):
    """Two workers of each role, a line to their router, and a judge who does as he is told.

    `acts[name]`: how the process of that name behaves, by what stand-ins know; `idle`: who is there and never serves.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.acts: dict[str, str] = {}
        self.idle: set[str] = set()
        self.router_is_away = False
        self.num_partners = 2
        self.told: list[tuple[Stage, str]] = []
        self.begun: list[ProcessSpec] = []
        self.proposals: list[Proposal] = []
        self.pauses: list[bool] = []

    def start(self, *, overlap: bool = True, standbys: tuple[Role, ...] = ()) -> tuple[Supervisor, Autoscaler]:
        workers = place_workers(2, 2, [])
        staff = Staff.of([*workers, *place_standbys(workers, standbys)])
        supervisor = self.supervisor()
        specs = [self._spec(each) for each in (*staff.workers.values(), *staff.standbys)]
        supervisor._specs = [*supervisor._specs, *specs]
        plan = Plan(spec_of=self._begun, overlap=overlap, sample_s=0.01)
        scaler = Autoscaler(supervisor.keeper, self, staff, plan, Ordered(self), Console(self.log, None))
        supervisor.add_companion(scaler.run)
        return supervisor, scaler

    def _begun(self, placement: Placement) -> ProcessSpec:
        self.begun.append(self._spec(placement))
        return self.begun[-1]

    def _spec(self, placement: Placement) -> ProcessSpec:
        name = placement.name
        flags = (self.acts.get(name, name), str(self.directory), str(self.port), str(placement.standby))
        return ProcessSpec(name, "stand_in", flags, kind_of(name))

    def alive(self) -> dict[str, int]:
        """Workers that run, and their process ids."""
        pids = {
            re.sub("^(stubborn|waiting)-", "", path.stem): int(path.read_text())
            for path in self.directory.glob("*.pid")
        }
        return {name: pid for name, pid in pids.items() if is_alive(pid)}

    async def sample(self) -> Sample | None:
        if self.router_is_away:
            return None
        loads = [
            WorkerLoad(
                name=name, incarnation=pid, role=Role[name.split("-")[0].upper()], pid=pid,
                is_serving=name not in self.idle, has_spoken=True, num_partners=self.num_partners, num_prompts=0,
                num_rows=0, most_rows=1, pool_id=1, num_blocks=1, num_used_blocks=0, num_steps=0, step_us=0,
            )
            for name, pid in self.alive().items()
        ]  # fmt: skip
        return Sample(time.monotonic(), LoadReport(0, tuple(loads)))

    async def report(self, name: str, successor: str, role: Role, stage: Stage, text: str) -> None:
        self.told.append((stage, text))

    @property
    def stages(self) -> list[Stage]:
        return [stage for stage, _ in self.told]


class Ordered(Judge):
    """Says what the scene says."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(Pace(), Machine(is_cpu=True))
        self._scene = scene

    def add(self, sample: Sample | None, ours: Mapping[str, object]) -> Proposal | None:
        return self._scene.proposals.pop() if self._scene.proposals else None

    def ended(self, now_s: float, role: Role, *, done: bool) -> float:
        self._scene.pauses.append(done)
        return super().ended(now_s, role, done=done)


CHANGE = Proposal("prefill-1", Role.DECODE, "decode is full")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(autoscaler, "POLL_S", 0.02)
    scene = Scene(tmp_path)
    yield scene
    scene.reserved.close()


@contextlib.asynccontextmanager
async def served(supervisor: Supervisor, scene: Scene) -> AsyncIterator[None]:
    """Until the end, when nothing may be left."""
    async with running(supervisor, lambda _: None) as run:
        yield
        supervisor.stop()
        assert await asyncio.wait_for(run, DEADLINE_S) == 0
    assert not scene.alive()
    assert "a bug ends" not in scene.log.getvalue()


async def test_the_new_one_serves_before_the_old_one_is_asked_to_leave(scene: Scene) -> None:
    supervisor, scaler = scene.start()
    async with served(supervisor, scene):
        scene.idle.add("decode-2")
        scene.proposals.append(CHANGE)
        await eventually(lambda: "decode-2" in scene.alive())
        await asyncio.sleep(0.2)
        assert set(scene.alive()) == BEFORE | {"decode-2"} and not scene.notes()
        scene.idle.clear()
        await eventually(lambda: Stage.DONE in scene.stages)
        assert scene.notes() == ["prefill-1 left"]
        assert set(scene.alive()) == set(scaler.staff.workers) == AFTER
    assert scene.stages == [Stage.BEGUN, Stage.DONE] and scene.pauses == [True]
    assert scene.told[0][1] == "prefill-1 on cpu becomes decode-2: decode is full"
    assert scene.told[1][1].startswith("decode-2 is in the place of prefill-1 after ")
    for _, text in scene.told:
        assert text in scene.log.getvalue()
    assert scene.notes()[1] == "router left"


async def test_where_there_is_no_room_for_both_the_old_one_leaves_first(scene: Scene) -> None:
    supervisor, scaler = scene.start(overlap=False)
    scene.num_partners = 1
    async with served(supervisor, scene):
        scene.idle.add("decode-2")
        scene.proposals.append(CHANGE)
        await eventually(lambda: "decode-2" in scene.alive())
        assert scene.notes() == ["prefill-1 left"]
        scene.idle.clear()
        await eventually(lambda: Stage.DONE in scene.stages)
        assert set(scene.alive()) == set(scaler.staff.workers) == AFTER


@pytest.mark.medium
@pytest.mark.parametrize("overlap", [True, False])
async def test_one_that_cannot_start_leaves_all_as_it_was(scene: Scene, overlap: bool) -> None:
    supervisor, scaler = scene.start(overlap=overlap)
    scene.acts["decode-2"] = "crashing"
    async with served(supervisor, scene):
        scene.proposals.append(CHANGE)
        await eventually(lambda: Stage.GIVEN_UP in scene.stages)
        await eventually(lambda: set(scene.alive()) == BEFORE)
        assert set(scaler.staff.workers) == BEFORE
        assert supervisor.keeper.names == BEFORE | {"router"}
    assert "prefill-1 stays" in scene.told[-1][1] and "has ended 3 times before it served" in scene.told[-1][1]
    assert scene.pauses == [False]


@pytest.mark.medium
async def test_one_that_does_not_serve_in_time_is_given_up(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler, "START_S", 0.5)
    supervisor, _ = scene.start()
    scene.idle.add("decode-2")
    async with served(supervisor, scene):
        scene.proposals.append(CHANGE)
        await eventually(lambda: Stage.GIVEN_UP in scene.stages)
        assert "did not serve within 0.5 s" in scene.told[-1][1]
        assert set(scene.alive()) == BEFORE


@pytest.mark.medium
@pytest.mark.parametrize("victim", ["prefill-1", "decode-2", "decode-0"])
async def test_whoever_dies_while_the_new_one_starts_in_the_end_as_many_run_as_before(
    scene: Scene, victim: str
) -> None:
    supervisor, scaler = scene.start()
    async with served(supervisor, scene):
        scene.idle.add("decode-2")
        scene.proposals.append(CHANGE)
        await eventually(lambda: "decode-2" in scene.alive())
        pid = scene.alive()[victim]
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: scene.alive().get(victim, pid) != pid)
        scene.idle.clear()
        await eventually(lambda: Stage.DONE in scene.stages)
        assert set(scene.alive()) == set(scaler.staff.workers) == AFTER


async def test_one_that_has_met_nobody_but_the_old_one_does_not_serve_yet(scene: Scene) -> None:
    supervisor, _ = scene.start()
    scene.num_partners = 1
    async with served(supervisor, scene):
        scene.proposals.append(CHANGE)
        await eventually(lambda: "decode-2" in scene.alive())
        await asyncio.sleep(0.2)
        assert scene.stages == [Stage.BEGUN] and set(scene.alive()) == BEFORE | {"decode-2"}
        scene.num_partners = 2
        await eventually(lambda: Stage.DONE in scene.stages)


async def test_a_router_that_is_away_for_a_while_holds_a_change_up(scene: Scene) -> None:
    supervisor, _ = scene.start()
    async with served(supervisor, scene):
        scene.idle.add("decode-2")
        scene.proposals.append(CHANGE)
        await eventually(lambda: "decode-2" in scene.alive())
        scene.router_is_away = True
        scene.idle.clear()
        await asyncio.sleep(0.2)
        assert scene.stages == [Stage.BEGUN] and set(scene.alive()) == BEFORE | {"decode-2"}
        scene.router_is_away = False
        await eventually(lambda: Stage.DONE in scene.stages)
        assert set(scene.alive()) == AFTER


@pytest.mark.medium
@pytest.mark.parametrize("victim", ["prefill-1", "decode-2"])
async def test_whoever_dies_while_the_old_one_leaves_in_the_end_as_many_run_as_before(
    scene: Scene, victim: str
) -> None:
    scene.acts["prefill-1"] = "stubborn-prefill-1"
    supervisor, scaler = scene.start()
    async with served(supervisor, scene):
        scene.proposals.append(CHANGE)
        await eventually(lambda: set(scaler.staff.workers) == AFTER)
        pid = scene.alive()[victim]
        os.kill(pid, signal.SIGKILL)
        if victim == "decode-2":
            await eventually(lambda: scene.alive().get(victim, pid) != pid)
            os.kill(scene.alive()["prefill-1"], signal.SIGKILL)
        await eventually(lambda: Stage.DONE in scene.stages)
        assert set(scene.alive()) == AFTER


async def test_one_that_does_not_finish_in_time_is_killed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.acts["prefill-1"] = "stubborn-prefill-1"
    supervisor, _ = scene.start()
    async with served(supervisor, scene):
        monkeypatch.setattr(Deadlines, "of", lambda *_, **__: 0.2)
        scene.proposals.append(CHANGE)
        await eventually(lambda: Stage.DONE in scene.stages)
        assert set(scene.alive()) == AFTER
        assert "killing prefill-1: not drained in 0.2 s" in scene.log.getvalue()


@pytest.mark.parametrize("amid", ["start", "drain"])
async def test_a_stop_amid_a_change_ends_all_in_order(scene: Scene, amid: str) -> None:
    if amid == "start":
        scene.idle.add("decode-2")
    else:
        scene.acts["prefill-1"] = "waiting-prefill-1"
    supervisor, _ = scene.start()
    async with served(supervisor, scene):
        scene.proposals.append(CHANGE)
        await eventually(lambda: "decode-2" in scene.alive() and (amid == "start" or bool(scene.notes())))
    assert scene.stages == [Stage.BEGUN]
    left = [note.removesuffix(" left") for note in scene.notes() if note.endswith("left")]
    assert left[0] == "router" and set(left[1:]) >= AFTER


async def test_standbys_are_told_anew_for_how_many_they_stand_by_before_the_old_one_leaves(scene: Scene) -> None:
    supervisor, scaler = scene.start(standbys=(Role.PREFILL, Role.DECODE))
    async with served(supervisor, scene):
        scene.proposals.append(CHANGE)
        await eventually(lambda: Stage.DONE in scene.stages)
        assert {each.name: each.standby for each in scaler.staff.standbys} == {
            "prefill-standby-0": 1,
            "decode-standby-0": 3,
        }
        assert {spec.name: spec.flags[3] for spec in scene.begun} == {
            "decode-2": "0",
            "prefill-standby-0": "1",
            "decode-standby-0": "3",
        }
        assert scene.notes()[-1] == "prefill-1 left"
        assert set(scene.alive()) >= AFTER


async def test_a_bug_ends_role_changes_and_nothing_else(scene: Scene) -> None:
    supervisor, scaler = scene.start()
    async with running(supervisor, lambda _: None) as run:
        scene.proposals.append(Proposal("nobody", Role.DECODE, ""))
        await eventually(lambda: "a bug ends --autoscale" in scene.log.getvalue())
        assert set(scene.alive()) == BEFORE and not run.done()
    assert isinstance(scene.log, io.StringIO) and set(scaler.staff.workers) == BEFORE
