"""Role changes of running workers: a worker of the other role starts, and once it serves, the old worker is drained.

Both workers map a single copy of the weights and use blocks of a single pool, so the new worker is ready in seconds.
Requests of the old worker end as in any drain. Whatever fails, the number of running workers stays: without the new
worker, the old worker stays or is started again. The supervisor restarts either worker after a crash.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from common.wire.messages.operator import Stage
from deploy.autoscale.judge import Judge
from deploy.autoscale.proposal import Proposal
from deploy.autoscale.router_line import Line
from deploy.processes.console import Console
from deploy.processes.keeper import Keeper
from deploy.processes.launch_plan import ProcessSpec
from deploy.processes.placement import Placement, Staff

logger = logging.getLogger(__name__)

SAMPLE_S = 1.0
"""Seconds between two samples, at most a part of a window."""
SAMPLES_A_WINDOW = 4
POLL_S = 0.3
"""Seconds between two checks for a serving worker."""
START_S = 300.0
"""Seconds for a worker to serve; weights are loaded and kernels compiled already."""
MOST_STARTS = 3
"""Crashes of a new worker before the change is given up."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of role changes.

    Args:
        spec_of: returns the process of a worker or standby.
        overlap: a device has room for an additional worker during a change.
    """

    spec_of: Callable[[Placement], ProcessSpec]
    overlap: bool = True
    sample_s: float = SAMPLE_S


class Autoscaler:
    """Loop that samples the router's load and carries out proposals of `judge`."""

    def __init__(self, keeper: Keeper, router: Line, staff: Staff, plan: Plan, judge: Judge, console: Console) -> None:
        self._keeper, self._router, self._plan, self._judge = keeper, router, plan, judge
        self._console = console
        self.staff = staff

    async def run(self) -> None:
        """Run until cancelled; an unexpected error ends role changes, and nothing else."""
        try:
            while True:
                await asyncio.sleep(self._plan.sample_s)
                proposal = self._judge.add(await self._router.sample(), self.staff.workers)
                if proposal is not None:
                    await self._change(proposal)
        except Exception as error:
            self._console.say(f"a bug ends --autoscale, roles stay as they are: {type(error).__name__}: {error}", "E")
            logger.exception("autoscaler")

    # --- a change -------------------------------------------------------------------------------

    async def _change(self, proposal: Proposal) -> None:
        old, begin_s = self.staff.workers[proposal.name], time.monotonic()
        after, new = self.staff.changed(old.name, proposal.role, self._keeper.names)

        async def report(stage: Stage, text: str) -> None:
            self._console.say(text, "W" if stage is Stage.GIVEN_UP else "I")
            await self._router.report(old.name, new.name, new.role, stage, text)

        await report(Stage.BEGUN, f"{old.name} on {old.device} becomes {new.name}: {proposal.reason}")
        change = self._overlapping if self._plan.overlap else self._one_after_the_other
        problem = await change(old, new, after)
        took = f"after {time.monotonic() - begin_s:.1f} s"
        if problem:
            await report(Stage.GIVEN_UP, f"{old.name} stays, {took}: {new.name} {problem}")
        else:
            await report(Stage.DONE, f"{new.name} is in the place of {old.name} {took}")
        pause_s = self._judge.ended(time.monotonic(), new.role, done=not problem)
        self._console.say(f"roles stay for {pause_s:g} s at least")

    async def _overlapping(self, old: Placement, new: Placement, after: Staff) -> str:
        """Start the new worker while the old worker serves; return the problem, if any."""
        self._begin(new)
        if problem := await self._awaited(new, num_partners=2):  # the leaving worker may be among the partners
            await self._keeper.stop(new.name)
            return problem
        before, self.staff = self.staff, after
        await self._move_standbys(before)
        await self._keeper.stop(old.name)
        return ""

    async def _one_after_the_other(self, old: Placement, new: Placement, after: Staff) -> str:
        """Retire the old worker first, because the device has no room for both; return the problem, if any.

        Other workers of the old role serve meanwhile.
        """
        before, self.staff = self.staff, after
        await self._move_standbys(before)
        await self._keeper.stop(old.name)
        self._begin(new)
        problem = await self._awaited(new, num_partners=1)
        if problem:
            await self._keeper.stop(new.name)
            self._begin(old)
            self.staff = before
            await self._move_standbys(after)
        return problem

    async def _move_standbys(self, before: Staff) -> None:
        """Restart changed standbys, because the number of peers is set at start; idle standbys end at once."""
        old, new = ({each.name: each for each in staff.standbys} for staff in (before, self.staff))
        for name in [name for name in old if old[name] != new.get(name)]:
            await self._keeper.stop(name)
        for name in [name for name in new if new[name] != old.get(name)]:
            self._begin(new[name])

    def _begin(self, placement: Placement) -> None:
        """Start a process, unless an unkillable process of equal name is left."""
        if placement.name not in self._keeper.names:
            self._keeper.start(self._plan.spec_of(placement))

    async def _awaited(self, new: Placement, num_partners: int) -> str:
        """Wait until the worker serves with KV paths to `num_partners` workers; return the problem, if any."""
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            await asyncio.sleep(POLL_S)
            if self._keeper.num_crashes(new.name) >= MOST_STARTS:
                return f"has ended {MOST_STARTS} times before it served; its last lines say why"
            sample, pid = await self._router.sample(), self._keeper.pid(new.name)
            serving = sample.serving if sample is not None else []
            if any((each.name, each.pid) == (new.name, pid) and each.num_partners >= num_partners for each in serving):
                return ""
        return f"did not serve within {START_S:g} s"
