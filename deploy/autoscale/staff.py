"""Who is to run: workers in their roles, and the standbys that follow from these."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from common.wire.messages.worker import Role
from deploy.processes.placement import Placement, free_name, place_standbys


@dataclass(frozen=True, slots=True)
class Staff:
    """Workers by name, and standbys; changes are made by making another one."""

    workers: dict[str, Placement]
    standbys: tuple[Placement, ...] = ()
    standby_roles: frozenset[Role] = frozenset()  # that have standbys wherever there is a worker of them

    @classmethod
    def of(cls, placements: Sequence[Placement]) -> "Staff":
        standbys = tuple(each for each in placements if each.standby)
        workers = {each.name: each for each in placements if not each.standby}
        return cls(workers, standbys, frozenset(each.role for each in standbys))

    def changed(self, name: str, role: Role, taken: Collection[str]) -> tuple["Staff", Placement]:
        """With another worker of that role on the device of `name`, which leaves; and that other worker.

        Args:
            taken: names of processes, which the other one cannot have.
        """
        successor = replace(self.workers[name], name=free_name(role.label, {*self.workers, *taken}), role=role)
        workers = {each: placement for each, placement in self.workers.items() if each != name}
        workers[successor.name] = successor
        standbys = tuple(place_standbys(list(workers.values()), self.standby_roles, self.standbys))
        return replace(self, workers=workers, standbys=standbys), successor
