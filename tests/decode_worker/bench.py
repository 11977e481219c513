"""An intake on a bench: one prefill worker whose copies end when the test says so, every message it sends at hand."""

from types import SimpleNamespace
from typing import Any, cast

from common.config import DecodeSection
from common.device.engine import Engine
from common.errors import TransferFailed
from common.wire.handoff_messages import KVProgress, KVRelease
from common.wire.messages import Message
from common.wire.packing import pack_ids
from common.wire.pool_shape import PoolShape
from common.wire.sockets import Hub
from decode_worker.intake import Intake
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import DecodeSequence
from decode_worker.sources import Source
from tests.layouts import allocator_of, tiny
from tests.messages import kv_handoff

BLOCK_SIZE = 4
Memory = dict[int, Any]


class Copy:
    """Reads its source when it ends: what a prefill worker did to the blocks meanwhile shows."""

    def __init__(self, source: Memory, target: Memory, pairs: list[tuple[int, int]]) -> None:
        self.source, self.target, self.pairs = source, target, pairs
        self.over = False
        self.is_broken = False

    def end(self) -> None:
        if not self.over and not self.is_broken:
            self.over = True
            for source_id, target_id in self.pairs:
                self.target[target_id] = self.source.get(source_id)

    def done(self) -> bool:
        if self.is_broken:
            raise TransferFailed("the way is blocked")
        return self.over

    def duration_s(self) -> float:
        return 1.0


class FakePool:
    """A source's pool; copies end when the test says so, or when it is closed."""

    shape = PoolShape(tiny(BLOCK_SIZE), (1000,))

    def __init__(self) -> None:
        self.memory: Memory = {}
        self.copies: list[Copy] = []
        self.is_broken = False

    def pull(self, source_ids: list[int], target: Any, target_ids: list[int]) -> Copy:
        assert source_ids, "a copy of nothing"
        if self.is_broken:
            raise TransferFailed("there is no way")
        self.copies.append(Copy(self.memory, target, list(zip(source_ids, target_ids, strict=True))))
        return self.copies[-1]

    def close(self) -> None:
        for copy in self.copies:
            copy.end()


class Rig:
    """An intake with one source, `p`."""

    def __init__(self, num_blocks: int = 40, max_num_seqs: int = 8, max_len: int = 1000) -> None:
        self.allocator, self.memory, self.said = allocator_of(num_blocks, BLOCK_SIZE), Memory(), list[Message]()
        self.scheduler = DecodeScheduler(self.allocator, max_num_seqs, max_len)
        engine = cast(Engine, SimpleNamespace(shared=None, pool=self.memory, allocator=self.allocator, vocab_size=1000))
        hub = cast(Hub, SimpleNamespace(send=lambda identity, message: self.said.append(message)))
        self.intake = Intake(engine, self.scheduler, DecodeSection(), hub, "d", 1)
        self.pool = self.meet("p")

    def meet(self, worker_id: str) -> FakePool:
        """Another prefill worker, proven."""
        pool = FakePool()
        self.intake.sources.by_id[worker_id] = Source(worker_id, 1, worker_id.encode(), pool, 1.0)
        return pool

    def progress(self, name: str, num_tokens: int, source_ids: list[int], attempt: int = 0) -> None:
        self.intake.progress(KVProgress("p", 1, name, attempt, num_tokens, pack_ids(source_ids)))

    def hand_off(
        self, name: str, num_tokens: int, source_ids: list[int], attempt: int = 0, worker_id: str = "p"
    ) -> None:
        handoff = kv_handoff(name, range(num_tokens + 1), source_ids, worker_id=worker_id, attempt=attempt)
        self.intake.accept(handoff)

    def turn(self) -> list[DecodeSequence]:
        """What a turn of the loop does with handoffs; returns what was activated."""
        arrived = self.intake.finish_pulls()
        for sequence in arrived:
            self.scheduler.activate(sequence)
        self.intake.start_pulls()
        self.intake.tend()
        self.allocator.check([*self.scheduler.blocks(), *self.intake.ahead.blocks()])
        return arrived

    def copied(self) -> list[list[int]]:
        """Source blocks of each copy."""
        return [[source for source, _ in copy.pairs] for copy in self.pool.copies]

    def end_copies(self) -> None:
        for copy in self.pool.copies:
            copy.end()

    def all_free(self) -> bool:
        return self.allocator.num_free == self.allocator.capacity

    def released(self) -> list[str]:
        return [message.request_id for message in self.said if isinstance(message, KVRelease)]
