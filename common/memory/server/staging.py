"""Staging of peers: host memory into which blocks of a pool are copied, for another host to read.

A memory server copies, because its process has the device's context and the pool. So a visit costs no device memory,
and no library of a network is near the blocks. The server waits for nobody: a peer names slots, whose copies are few.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from common.base.errors import MemoryShort
from common.memory.base.channel import Gone
from common.memory.blocks.answers import Answer, ProtocolError
from common.memory.blocks.pool import Pool
from common.memory.devices.backing import Backing, Copies, Copy, CopyFailed, SharedPiece, gb, runs_of
from common.wire.messages.staging import BlocksStaged, BlocksStaging, StagingRegion, StagingWanted
from common.wire.values.packing import unpack_ids

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Staging:
    """Staging of a peer; `shared` is None until its thread has made it.

    A slot with a copy under way is in `copies`, with the number of the peer's message.
    """

    pool: Pool
    wanted: StagingWanted
    thread: threading.Thread = field(init=False)
    shared: SharedPiece | None = None
    problem: str = ""
    is_told: bool = False
    copies: dict[int, tuple[int, Copy]] = field(default_factory=dict)

    def begin(self, make: Callable[[int], SharedPiece]) -> None:
        """Begin to make the memory, in a thread, because pinning takes a while."""
        self.thread = threading.Thread(target=self._make, args=(make,), name="staging", daemon=True)
        self.thread.start()

    @property
    def num_bytes(self) -> int:
        return self.wanted.num_slots * self.wanted.slot_bytes

    @property
    def is_busy(self) -> bool:
        """Tell whether its memory is being made, or a copy is under way."""
        return not self.is_told or bool(self.copies)

    def staged(self) -> list[int]:
        """Take copies that are over; return the numbers of their messages. Raises CopyFailed."""
        over = [slot for slot, (_, copy) in self.copies.items() if copy.took_s() is not None]
        return [self.copies.pop(slot)[0] for slot in over]

    def _make(self, make: Callable[[int], SharedPiece]) -> None:
        try:
            self.shared = make(self.num_bytes)
        except MemoryShort as short:
            self.problem = str(short)


class Stagings:
    """Staging by client."""

    def __init__(self, backing: Backing) -> None:
        self._backing = backing
        self._copies: Copies | None = None  # made for the first staging
        self._of_client: dict[int, Staging] = {}
        self._leaving: list[Staging] = []  # of gone peers, until their copies are over

    @property
    def is_busy(self) -> bool:
        """Tell whether something is about to be over."""
        return bool(self._leaving) or any(staging.is_busy for staging in self._of_client.values())

    def want(self, client: int, pool: Pool | None, wanted: StagingWanted) -> list[Answer]:
        """Begin to make staging for a peer; `update` answers. Raises ProtocolError."""
        if pool is None or client in self._of_client:
            raise ProtocolError("it has staging already, or no pool")
        if wanted.slot_bytes < max(group.block_bytes for group in pool.layout.groups):
            raise ProtocolError(f"slots of {wanted.slot_bytes} bytes, less than a block")
        staging = self._of_client[client] = Staging(pool, wanted)
        staging.begin(self._backing.shared_piece)
        return []

    def stage(self, client: int, message: BlocksStaging) -> list[Answer]:
        """Begin to copy blocks into a slot; raises ProtocolError."""
        staging = self._of_client.get(client)
        if staging is None or not staging.is_told or staging.shared is None:
            raise ProtocolError("it has no staging")
        slot, wanted = message.slot, staging.wanted
        if slot >= wanted.num_slots or slot in staging.copies:
            raise ProtocolError(f"slot {slot} of {wanted.num_slots} is not its own")
        block_ids, shape = unpack_ids(message.block_ids), staging.pool.index.shape
        if not block_ids or min(block_ids) < 0 or max(block_ids) >= shape.num_ids:
            raise ProtocolError(f"blocks beyond the pool's {shape.num_ids}")
        begin = slot * wanted.slot_bytes
        runs = runs_of(shape, block_ids, staging.shared.piece, begin)
        if sum(run.num_bytes for run in runs) > wanted.slot_bytes:
            raise ProtocolError(f"{len(block_ids)} blocks for a slot of {wanted.slot_bytes} bytes")
        try:
            self._copies = self._copies or self._backing.copies()
            staging.copies[slot] = message.number, self._copies.begin(staging.pool.memory, runs, is_out=True)
        except CopyFailed as failed:
            raise ProtocolError(f"blocks cannot be copied: {failed}") from None
        return self.update(client)

    def update(self, client: int) -> list[Answer]:
        """Tell a peer of its staging, and of copies that are over; raises Gone, and MemoryShort without room."""
        staging = self._of_client.get(client)
        if staging is None:
            return []
        if not staging.is_told:
            if staging.problem:
                raise MemoryShort(f"staging: {staging.problem}")
            if staging.shared is None:
                return []
            staging.is_told = True
            logger.info("staging of %s for a peer", gb(staging.num_bytes))
            return [Answer(client, StagingRegion(staging.num_bytes), staging.shared.descriptor)]
        try:
            return [Answer(client, BlocksStaged(number)) for number in staging.staged()]
        except CopyFailed as failed:
            raise Gone(f"its blocks cannot be copied: {failed}") from None

    def leave(self, client: int) -> None:
        """Free the staging of a gone peer once its copies are over."""
        if (staging := self._of_client.pop(client, None)) is not None:
            self._leaving.append(staging)

    def free(self) -> None:
        """Free staging whose peers are gone and whose copies are over."""
        self._leaving = [staging for staging in self._leaving if not _is_freed(staging)]

    def close(self) -> None:
        """Free all memory, after copies under way."""
        self._leaving += self._of_client.values()
        self._of_client.clear()
        for staging in self._leaving:
            staging.thread.join()
        try:
            if self._copies is not None:
                self._copies.finish()
        except CopyFailed as failed:
            logger.warning("copies of blocks failed: %s", failed)
        for staging in self._leaving:
            if staging.shared is not None:
                staging.shared.close()


def _is_freed(staging: Staging) -> bool:
    if staging.thread.is_alive():
        return False
    try:
        staging.staged()
    except CopyFailed:
        staging.copies.clear()  # the device copies no more
    if not staging.copies and staging.shared is not None:
        staging.shared.close()
    return not staging.copies
