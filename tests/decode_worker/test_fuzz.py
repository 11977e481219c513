"""Whatever a router and a prefill worker may say: dropped or done, and the worker serves on."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.device.prompt_buffers import PromptChunk
from common.errors import TransferFailed
from common.kv.pool import KVPool
from common.kv.transport import Transport
from common.wire.frames import decode, encode
from common.wire.handoff_messages import KVHandoff, KVPoolExport, KVProgress
from common.wire.messages import Abort, Message, PrefillRequest
from common.wire.pool_shape import PoolShape
from common.wire.sampling_params import SamplingParams
from common.wire.worker_id import connection_of
from decode_worker.sources import Source
from tests.decode_worker.bench import Copy, FakePool
from tests.decode_worker.test_worker import VOCAB, Chunk, Rig, Step
from tests.messages import LAYOUT, kv_handoff
from tests.wire.values import aimed_messages

PEERS = [("p", 1), ("q", 2)]
KINDS = (KVHandoff, KVProgress, PrefillRequest, Abort)
NUM_PEER_BLOCKS = 50


class Pool(dict[int, Any]):
    """This worker's memory."""

    layout, shape = LAYOUT, PoolShape(LAYOUT, (33,))

    def close(self) -> None: ...


class CarefulPool(FakePool):
    """A prefill worker's memory: ids outside it are refused, as by every transport, and copies end at once."""

    shape = PoolShape(LAYOUT, (NUM_PEER_BLOCKS,))

    def pull(self, source_ids: list[int], target: Any, target_ids: list[int]) -> Copy:
        if max(source_ids) >= NUM_PEER_BLOCKS:
            raise TransferFailed("no such block")
        copy = super().pull(source_ids, target, target_ids)
        copy.end()
        return copy


class Careful(Rig):
    """Its device stands no wrong operand."""

    def __init__(self) -> None:
        super().__init__()
        engine = cast(SimpleNamespace, self.worker.engine)
        engine.pool = self.worker.intake.ahead.pool = cast(KVPool, Pool())
        engine.device, engine.transport = None, cast(Transport, SimpleNamespace(name="shm", open_peer=_no_peer))

    def meet(self) -> None:
        """The prefill worker `p` is known and its path proven."""
        if "p" not in self.worker.intake.sources.by_id:
            source = Source("p", 1, connection_of("p", 1), CarefulPool(), 1.0)
            self.worker.intake.sources.by_id["p"] = source

    def check_blocks(self) -> None:
        owned = [*self.worker.scheduler.blocks(), *self.worker.intake.ahead.blocks()]
        self.allocator.check(owned)

    def _launch_step(self, num_rows: int, **asked: bool) -> Step:
        for sequence in self.worker.scheduler.rows.sequences:
            assert sequence.num_scheduled <= 16 * len(sequence.tables[0].block_ids) and sequence.num_scheduled <= 512
            assert all(0 <= token < VOCAB for token in sequence.token_ids)
        return super()._launch_step(num_rows, **asked)

    def _launch_chunk(self, chunks: list[PromptChunk]) -> Chunk:
        assert all(0 <= token < VOCAB for chunk in chunks for token in chunk.token_ids)
        chunk = super()._launch_chunk(chunks)
        chunk.over = True
        return chunk


def _no_peer(export: KVPoolExport, device: object) -> None:
    raise TransferFailed("not there")


@pytest.fixture(scope="module")
def rig() -> Iterator[Careful]:
    rig = Careful()
    yield rig
    rig.close()


@given(st.lists(aimed_messages(("p", 1), PEERS, KINDS), min_size=6, max_size=10))
@settings(max_examples=60)
def test_no_message_costs_more_than_itself(rig: Careful, messages: list[Message]) -> None:
    for message in messages:
        rig.meet()
        message = decode(encode(message))
        rig.worker.inbox._from_router(message)
        rig.worker.inbox._from_prefill(connection_of("p", 1), message)
        rig.turn()
        rig.check_blocks()
    rig.worker.forget_everything()
    rig.turn()
    rig.check_blocks()


def test_after_all_that_it_serves(rig: Careful) -> None:
    rig.meet()
    handoff = kv_handoff("last", range(31), [1, 2], sampling=SamplingParams(max_tokens=9))
    rig.worker.inbox._from_prefill(connection_of("p", 1), handoff)
    rig.turn_until(lambda: len(rig.sent("last")) == 8)
    rig.turn()
    rig.check_blocks()
