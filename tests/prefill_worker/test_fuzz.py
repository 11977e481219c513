"""Whatever a router and a decode worker may say: dropped or done, and the worker serves on."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.device.steps.prompt_buffers import PromptChunk
from common.wire.messages.frames import decode, encode
from common.wire.messages.worker import Abort, DecodePeer, Message, PrefillRequest
from common.wire.messages.worker_id import connection_of, is_from
from tests.prefill_worker.test_worker import VOCAB, Rig, Step
from tests.support.sequences import blocks_of_prompts
from tests.wire.strategies import aimed_messages

PEERS = [("d", 1), ("e", 2)]


class Careful(Rig):
    """Its device stands no wrong operand."""

    def _launch(self, chunks: list[PromptChunk], *, whole_gpu: bool) -> Step:
        blocks = [block_id for chunk in chunks for block_id in chunk.tables[0]]
        assert len(set(blocks)) == len(blocks) and all(0 < i <= self.allocator.capacity[0] for i in blocks)
        assert all(0 <= token < VOCAB for chunk in chunks for token in chunk.token_ids)
        assert all(chunk.end <= 16 * len(chunk.tables[0]) for chunk in chunks)
        return super()._launch(chunks, whole_gpu=whole_gpu)

    def meet(self) -> None:
        """The decode worker `d` is known, and it can pull from here."""
        if self.worker.targets.proven("d", 1) is None:
            self.worker.targets.join(DecodePeer("d", 1, self.decode.endpoint))
            self.turn_until(lambda: self.worker.targets.proven("d", 1) is not None)


@pytest.fixture(scope="module")
def rig() -> Iterator[Careful]:
    rig = Careful(max_batch_tokens=64)
    yield rig
    rig.close()


@pytest.mark.medium
@given(st.lists(aimed_messages(("d", 1), PEERS, (PrefillRequest, Abort)), min_size=6, max_size=10))
@settings(max_examples=60)
def test_no_message_costs_more_than_itself(rig: Careful, messages: list[Message]) -> None:
    worker = rig.worker
    for message in messages:
        rig.meet()
        message = decode(encode(message))
        worker.link.dispatch(message, worker.inbox.router_handlers)
        target = worker.targets.by_id.get("d")
        if target is not None and is_from(connection_of(target.worker_id, target.epoch), message):
            worker.handoffs.handle(target, message)
        rig.turn()
        for step in rig.steps:
            step.over = True
    worker.drain.asked = False  # who is told to leave takes nothing more
    worker.inbox.forget_everything()
    worker.drain.asked = False  # a router may have it leave
    rig.allocator.check(blocks_of_prompts(worker.scheduler))


def test_after_all_that_it_serves(rig: Careful) -> None:
    rig.meet()
    rig.handed_off.clear()
    rig.ask("last", 40)

    def over() -> bool:
        for step in rig.steps:
            step.over = True
        return any(handoff.request_id == "last" for handoff in rig.handed_off)

    rig.turn_until(over)
