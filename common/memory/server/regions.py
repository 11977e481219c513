"""Regions of weights: filler, waiting workers, users. Knows clients by number, and no sockets.

    wanted:                         a new region is EMPTY, and the first user fills the region.
    filled:                         EMPTY ──▶ FILLED.
    the filler is gone:             still EMPTY; the next user in line fills the region.
    memory is short, no user left:  the region is freed.

A region possibly damaged by a device fault is given to no new client, and freed after the last user.

A dead filler may still write for a moment. Such writes are harmless, because the next filler writes equal bytes to
equal places: a region is shared only under equal fingerprint and layout.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from common.base.errors import MemoryShort
from common.memory.blocks.answers import Answer, ProtocolError
from common.memory.devices.backing import Backing, Memory
from common.wire.messages.memory import RegionState, WeightsFilled, WeightsProgress, WeightsRegion, WeightsWanted


@dataclass(slots=True, eq=False)
class Region:
    """A region of weights; until filled, its first user is the filler. Equal wants mean equal bytes."""

    key: WeightsWanted
    memory: Memory
    users: list[int] = field(default_factory=list)
    num_filled: int = 0
    is_filled: bool = False

    def state_for(self, client: int) -> RegionState:
        if self.is_filled:
            return RegionState.FILLED
        return RegionState.EMPTY if self.users[0] == client else RegionState.FILLING

    def answer_to(self, client: int) -> Answer:
        memory = self.memory
        message = WeightsRegion(self.state_for(client), memory.handle, memory.num_bytes)
        return Answer(client, message, memory.descriptor)


class Regions:
    """All weight regions of a device; a client has at most one."""

    def __init__(self, backing: Backing, log: Callable[[str], None] = lambda text: None) -> None:
        self.backing = backing
        self.log = log
        self.regions: dict[WeightsWanted, Region] = {}  # open to new clients
        self.of_client: dict[int, Region] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all regions, filled or not, used or not."""
        return sum(region.memory.num_bytes for region in self._all())

    def want(self, client: int, key: WeightsWanted) -> Answer:
        """Give a region to a client; raises MemoryShort if there is no room even without unused regions.

        The caller may try again. Raises ProtocolError for a second region.
        """
        if client in self.of_client:
            raise ProtocolError("it has a region already")
        if key not in self.regions:
            self.regions[key] = Region(key, self.allocate(key.num_bytes))
        region = self.regions[key]
        region.users.append(client)
        self.of_client[client] = region
        return region.answer_to(client)

    def progressed(self, client: int, num_filled: int) -> Iterator[Answer]:
        """Record a filler's progress; return answers for waiting users."""
        region = self._filled_by(client)
        region.num_filled = min(num_filled, region.memory.num_bytes)
        return (Answer(user, WeightsProgress(region.num_filled)) for user in region.users[1:])

    def filled(self, client: int) -> Iterator[Answer]:
        """Seal a filled region; return answers for waiting users."""
        region = self._filled_by(client)
        region.memory.seal()
        region.is_filled, region.num_filled = True, region.memory.num_bytes
        return (Answer(user, WeightsFilled(region.memory.num_bytes)) for user in region.users[1:])

    def holds_up_others(self, client: int) -> bool:
        """Tell whether others wait for a region filled by this client."""
        region = self.of_client.get(client)
        return region is not None and region.state_for(client) is RegionState.EMPTY and len(region.users) > 1

    def taint(self, client: int) -> set[int]:
        """Retire the client's region, so new workers get another; return all its users."""
        region = self.of_client.get(client)
        if region is None:
            return set()
        if self.regions.get(region.key) is region:
            del self.regions[region.key]
        return set(region.users)

    def leave(self, client: int) -> Iterator[Answer]:
        """Remove a client; answers tell the next user to fill if the client was the filler."""
        region = self.of_client.pop(client, None)
        if region is None:
            return
        was_filler = not region.is_filled and region.users[0] == client
        region.users.remove(client)
        if was_filler and region.users:
            yield region.answer_to(region.users[0])
        if not region.users and self.regions.get(region.key) is not region:
            region.memory.close()

    def close(self) -> None:
        for region in self._all():
            region.memory.close()

    def _all(self) -> set[Region]:
        return {*self.regions.values(), *self.of_client.values()}

    def _filled_by(self, client: int) -> Region:
        region = self.of_client.get(client)
        if region is None or region.state_for(client) is not RegionState.EMPTY:
            raise ProtocolError("it fills no region")
        return region

    def allocate(self, num_bytes: int) -> Memory:
        """Allocate memory, if necessary by freeing unused regions; raises MemoryShort."""
        try:
            return self.backing.allocate(num_bytes)
        except MemoryShort:
            unused = [key for key, region in self.regions.items() if not region.users]
            if not unused:
                raise
            for key in unused:
                self.log(f"weights of {key.fingerprint}, which nobody uses, make room for others")
                self.regions.pop(key).memory.close()
            return self.backing.allocate(num_bytes)
