"""Workers to run, by role, and the standbys for these workers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from common.wire.messages.worker import Role
from deploy.processes.placement import Placement, free_name, place_standbys


@dataclass(frozen=True, slots=True)
class Staff:
    """Workers by name, and standbys; immutable, so a change makes a new staff."""

    workers: dict[str, Placement]
    standbys: tuple[Placement, ...] = ()
    standby_roles: frozenset[Role] = frozenset()  # roles with a standby on each of their devices

    @classmethod
    def of(cls, placements: Sequence[Placement]) -> "Staff":
        standbys = tuple(each for each in placements if each.standby)
        workers = {each.name: each for each in placements if not each.standby}
        return cls(workers, standbys, frozenset(each.role for each in standbys))

    def changed(self, name: str, role: Role, taken: Collection[str]) -> tuple["Staff", Placement]:
        """Return the staff with worker `name` replaced by a worker of `role` on its device, and the new worker.

        Args:
            taken: names of processes, not available for the new worker.
        """
        successor = replace(self.workers[name], name=free_name(role.label, {*self.workers, *taken}), role=role)
        workers = {each: placement for each, placement in self.workers.items() if each != name}
        workers[successor.name] = successor
        standbys = tuple(place_standbys(list(workers.values()), self.standby_roles, self.standbys))
        return replace(self, workers=workers, standbys=standbys), successor
