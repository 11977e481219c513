"""Regions of weights: who fills one, who waits for it, who uses it. Knows clients by number, and no sockets.

    wanted ──▶ EMPTY ──progress, filled──▶ FILLED ──nobody uses it and memory is short──▶ gone
                 ▲        │
                 └────────┘ its filler is gone: the next in line fills it

Of a region that a fault of a device may have damaged nobody hears any more; it is gone with the last that maps it.

A filler that died may still write for a moment: that is harmless, as whoever comes after it writes the same bytes to
the same places, which is what one fingerprint and one layout mean.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from common.base.errors import MemoryShort
from common.memory.blocks.answers import Answer, Misbehaved
from common.memory.devices.backing import Backing, Memory
from common.wire.messages.memory import RegionState, WeightsFilled, WeightsProgress, WeightsRegion


class RegionKey(NamedTuple):
    """What weights are the same."""

    fingerprint: str
    layout: str
    num_bytes: int


@dataclass(slots=True, eq=False)
class Region:
    """The first of its users fills it, until it is filled."""

    key: RegionKey
    memory: Memory
    users: list[int] = field(default_factory=list)
    num_filled: int = 0
    is_filled: bool = False

    def state_for(self, client: int) -> RegionState:
        if self.is_filled:
            return RegionState.FILLED
        return RegionState.EMPTY if self.users[0] == client else RegionState.FILLING

    def told(self, client: int) -> Answer:
        memory = self.memory
        message = WeightsRegion(self.state_for(client), memory.handle, memory.num_bytes)
        return Answer(client, message, memory.descriptor)


class Regions:
    """All of one device; a client has one at most."""

    def __init__(self, backing: Backing, say: Callable[[str], None] = lambda text: None) -> None:
        self.backing = backing
        self.say = say
        self.regions: dict[RegionKey, Region] = {}  # that who comes may map
        self.of_client: dict[int, Region] = {}

    @property
    def num_bytes(self) -> int:
        """Of all regions, filled or not, used or not."""
        return sum(region.memory.num_bytes for region in self._all())

    def want(self, client: int, key: RegionKey) -> Answer:
        """Raises MemoryShort when there is no room for it, even after what nobody uses is gone; then try again."""
        if client in self.of_client:
            raise Misbehaved("it has a region already")
        if key not in self.regions:
            self.regions[key] = Region(key, self.allocate(key.num_bytes))
        region = self.regions[key]
        region.users.append(client)
        self.of_client[client] = region
        return region.told(client)

    def progressed(self, client: int, num_filled: int) -> Iterator[Answer]:
        """For those that wait."""
        region = self._filled_by(client)
        region.num_filled = min(num_filled, region.memory.num_bytes)
        return (Answer(user, WeightsProgress(region.num_filled)) for user in region.users[1:])

    def filled(self, client: int) -> Iterator[Answer]:
        """For those that waited."""
        region = self._filled_by(client)
        region.memory.seal()
        region.is_filled, region.num_filled = True, region.memory.num_bytes
        return (Answer(user, WeightsFilled(region.memory.num_bytes)) for user in region.users[1:])

    def holds_up_others(self, client: int) -> bool:
        """Whether others wait for what this one fills."""
        region = self.of_client.get(client)
        return region is not None and region.state_for(client) is RegionState.EMPTY and len(region.users) > 1

    def taint(self, client: int) -> set[int]:
        """Whoever comes gets another region than what a client maps; returns all who map that."""
        region = self.of_client.get(client)
        if region is None:
            return set()
        self._retire(region)
        return set(region.users)

    def leave(self, client: int) -> Iterator[Answer]:
        """It is gone; if it filled a region, the next in line is told to."""
        region = self.of_client.pop(client, None)
        if region is None:
            return
        was_filler = not region.is_filled and region.users[0] == client
        region.users.remove(client)
        if was_filler and region.users:
            yield region.told(region.users[0])
        if not region.users and self.regions.get(region.key) is not region:
            region.memory.close()

    def close(self) -> None:
        for region in self._all():
            region.memory.close()

    def _all(self) -> set[Region]:
        return {*self.regions.values(), *self.of_client.values()}

    def _retire(self, region: Region) -> None:
        if self.regions.get(region.key) is region:
            del self.regions[region.key]

    def _filled_by(self, client: int) -> Region:
        region = self.of_client.get(client)
        if region is None or region.state_for(client) is not RegionState.EMPTY:
            raise Misbehaved("it fills no region")
        return region

    def allocate(self, num_bytes: int) -> Memory:
        """Raises MemoryShort, if it is short even without what nobody uses."""
        try:
            return self.backing.allocate(num_bytes)
        except MemoryShort:
            unused = [key for key, region in self.regions.items() if not region.users]
            if not unused:
                raise
            for key in unused:
                self.say(f"weights of {key.fingerprint}, which nobody uses, make room for others")
                self.regions.pop(key).memory.close()
            return self.backing.allocate(num_bytes)
