"""Whatever a router and a prefill worker may say: dropped or done, and the worker serves on."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.base.errors import TransferFailed
from common.device.steps.prompt_buffers import PromptChunk
from common.kv.pool import KVPool
from common.kv.transport import Transport
from common.memory.client.lease_cache import Grant
from common.serving.prompts.requests import Key
from common.wire.messages.frames import decode, encode
from common.wire.messages.handoff import DecodeRequest, KVProgress
from common.wire.messages.memory import KVOffer, PromptBlocks
from common.wire.messages.worker import Abort, Message, PrefillRequest
from common.wire.messages.worker_id import connection_of
from common.wire.values.kv_layout import Counts
from common.wire.values.packing import pack_ids, unpack_ids
from common.wire.values.pool_shape import PoolShape
from common.wire.values.sampling_params import SamplingParams
from tests.decode_worker.bench import Copy, FakePool, met
from tests.decode_worker.test_worker import VOCAB, Chunk, Rig, Step
from tests.support.messages import LAYOUT, decode_request, kv_offer
from tests.support.sequences import blocks_ahead, blocks_of_worker
from tests.wire.strategies import aimed_messages

PEERS = [("p", 1), ("q", 2)]
KINDS = (KVOffer, KVProgress, PrefillRequest, DecodeRequest, DecodeRequest, Abort)
NUM_PEER_BLOCKS = 50


class Pool(dict[int, Any]):
    """This worker's memory."""

    layout, shape = LAYOUT, PoolShape(LAYOUT, (33,))


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
        engine.pool = self.worker.pulls.early.ahead.pool = self.worker.pulls.transfers.pool = cast(KVPool, Pool())
        leases = cast(Any, self.allocator)
        leases.want_prompt, leases.unwant_prompt = self._grant, lambda key: None
        leases.granted = lambda message: Grant([[]], [unpack_ids(message.block_ids)], 0, 0)
        leases.seal = lambda block_ids, digests: None
        engine.transport = cast(Transport, SimpleNamespace(name="shm"))

    def meet(self) -> None:
        """The prefill worker `p` is known and its path proven."""
        if "p" not in self.worker.sources.by_id:
            met(self.worker.sources, CarefulPool())

    def _grant(self, key: Key, digests: list[bytes], counts: Counts, priority: int = 0, *, resumes: bool) -> None:
        """Answer at once if there are so many blocks, and else never."""
        if self.allocator.has(counts):
            ids = pack_ids(self.allocator.allocate(counts)[0])
            self.pool.arriving.append(PromptBlocks(*key, ids, ids, 0))

    def check_blocks(self) -> None:
        owned = [*blocks_of_worker(self.worker), *blocks_ahead(self.worker.pulls.early.ahead)]
        owned += [handoff.grant.block_ids for handoff in self.worker.pulls.waiting if handoff.grant is not None]
        owned += [unpack_ids(each.block_ids) for each in self.pool.arriving if isinstance(each, PromptBlocks)]
        self.allocator.check(owned)

    def _launch_step(self, num_rows: int, **asked: int) -> Step:
        for sequence in self.worker.scheduler.rows.sequences:
            assert sequence.num_scheduled <= 16 * len(sequence.tables[0].block_ids) and sequence.num_scheduled <= 512
            assert all(0 <= token < VOCAB for token in sequence.token_ids)
        return super()._launch_step(num_rows, **asked)

    def _launch_chunk(self, chunks: list[PromptChunk], *, whole_gpu: bool = True) -> Chunk:
        assert all(0 <= token < VOCAB for chunk in chunks for token in chunk.token_ids)
        chunk = super()._launch_chunk(chunks)
        chunk.over = True
        return chunk


@pytest.fixture(scope="module")
def rig() -> Iterator[Careful]:
    rig = Careful()
    yield rig
    rig.close()


@pytest.mark.medium
@given(st.lists(aimed_messages(("p", 1), PEERS, KINDS), min_size=6, max_size=10))
@settings(max_examples=60)
def test_no_message_costs_more_than_itself(rig: Careful, messages: list[Message]) -> None:
    for message in messages:
        rig.meet()
        message = decode(encode(message))
        rig.worker.link.dispatch(message, rig.worker.inbox.router_handlers)
        rig.worker.inbox._from_prefill(connection_of("p", 1), message)
        rig.meet()
        if isinstance(message, KVOffer):
            rig.offer(message)
        rig.turn()
        rig.check_blocks()
    rig.worker.inbox.drain.asked = False  # who is told to leave takes nothing more
    rig.worker.cancellation.drop_all()
    rig.turn()
    rig.check_blocks()


def test_after_all_that_it_serves(rig: Careful) -> None:
    rig.meet()
    rig.tell(decode_request("last", range(30), sampling=SamplingParams(max_tokens=9)))
    rig.turn_until(lambda: ("last", 0) in rig.worker.arrivals.announced)
    rig.offer(kv_offer("last", [1, 2]))
    rig.turn_until(lambda: len(rig.sent("last")) == 8)
    rig.turn()
    rig.check_blocks()
