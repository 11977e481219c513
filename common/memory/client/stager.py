"""A socket to the gate for staging, used by one thread while the visit's own is another's."""

from collections.abc import Iterable, Iterator

from common.base.errors import MemoryLost, WireError
from common.wire.messages.frames import decode, encode
from common.wire.messages.gates import GateOver, StagingFrame
from common.wire.messages.staging import BlocksStaged, BlocksStaging
from common.wire.transport.sockets import Spoke
from common.wire.values.packing import pack_ids


class Stager:
    """Asks the memory server of a visit to copy blocks into slots."""

    def __init__(self, spoke: Spoke, visit: int) -> None:
        self.spoke, self.visit = spoke, visit

    def stage(self, number: int, slot: int, block_ids: Iterable[int]) -> None:
        """Ask for blocks in a slot, which no read is under way of."""
        message = BlocksStaging(number, slot, pack_ids(block_ids))
        self.spoke.send(StagingFrame(self.visit, encode(message)))

    def staged(self) -> Iterator[int]:
        """Yield the numbers of messages whose blocks are in their slots; raises MemoryLost at the visit's end."""
        for message in self.spoke.receive():
            match message:
                case StagingFrame() if message.visit == self.visit:
                    yield _number(message.frame)
                case GateOver():
                    raise MemoryLost(message.reason)
                case _:
                    self.spoke.refuse(message, "it is of no staging")

    def close(self) -> None:
        self.spoke.close()


def _number(frame: bytes) -> int:
    try:
        message = decode(frame)
    except WireError as error:
        raise MemoryLost(str(error)) from None
    if not isinstance(message, BlocksStaged):
        raise MemoryLost(f"{type(message).__name__} in place of BlocksStaged")
    return message.number
