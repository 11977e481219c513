"""Whatever workers may say, in their own name or not: the router drops it or does it, and serves on."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.settings.config import Config, ModelSection, NetSection, RouterSection
from common.wire.messages.frames import decode, encode
from common.wire.messages.memory_reports import KVEvents, MemoryReady, WorkerEnded
from common.wire.messages.worker import Heartbeat, KVPathReport, Message, RequestFailed, Role, TokenBatch
from common.wire.messages.worker_id import BEAT_SUFFIX, connection_of
from common.wire.values.sampling_params import SamplingParams
from router.dispatch.completion.state import Completion, State
from router.service import Service
from router.text.detokenizer import TextStream
from tests.support.completions import make_completion
from tests.support.fakes import FakeModel, free_endpoint
from tests.support.messages import kv_path, worker_ready
from tests.wire.strategies import aimed_messages

PEERS = [("p", 1), ("d", 1), ("e", 2)]
MEMORY = PEERS[2]
KINDS = (TokenBatch, KVPathReport, RequestFailed, Heartbeat, WorkerEnded, KVEvents)
POOLS = {"p": 0, "d": 0, "q": 1}


class Rig:
    """A router without HTTP and without workers: their messages are put into its hands."""

    def __init__(self, model_dir: Path, model: FakeModel) -> None:
        net, limits = NetSection(router_endpoint=free_endpoint()), RouterSection(port=0)
        self.service = Service(Config(model=ModelSection(path=str(model_dir)), net=net, router=limits))
        self.service.dispatcher.scheduler.defer = lambda act: act()  # there is no event loop
        self.handlers = self.service.handlers()
        self.model = model

    def hear(self, connection: bytes, message: Message) -> None:
        if (handler := self.handlers.get(type(message))) is not None:
            handler(connection, decode(encode(message)))

    def meet(self) -> None:
        """All workers are registered, whatever they have said, and blocks travel from `p` to `d`."""
        self.service._membership._expelled.clear()
        self.hear(connection_of(*MEMORY), MemoryReady(*MEMORY, 1, "1", "cpu"))
        for worker_id, role in (("p", Role.PREFILL), ("d", Role.DECODE), ("q", Role.PREFILL)):
            worker = self.service.pool.get(worker_id, 1)
            if worker is not None and worker.draining:
                self.service.pool.remove(worker)
            ready = worker_ready(
                worker_id,
                role,
                model_name=self.model.name,
                model_fingerprint=self.model.fingerprint,
                tokenizer_fingerprint=self.model.tokenizer_fingerprint,
                num_blocks=(100,),
                max_model_len=600,
                handoff_endpoint="ipc:///nowhere",
                memory_server_id=MEMORY[0],
                memory_server_epoch=MEMORY[1],
                pool_id=POOLS[worker_id],
            )
            self.hear(connection_of(worker_id, 1), ready)
        self.hear(connection_of("d", 1), kv_path("p", "d"))

    def submit(self, name: str) -> Completion:
        text = TextStream(self.service.tokenizer.decode)
        completion = make_completion(name, [1, 2, 3], SamplingParams(max_tokens=20), text)
        for _ in self.service.dispatcher.prepare([completion]):
            pass
        self.service.dispatcher.submit([completion])
        return completion


@pytest.fixture(scope="module")
def rig(model_dir: Path, model: FakeModel) -> Iterator[Rig]:
    rig = Rig(model_dir, model)
    yield rig
    asyncio.run(rig.service.close())


@pytest.mark.medium
@given(
    st.lists(
        st.tuples(aimed_messages(("d", 1), PEERS, KINDS), st.sampled_from(PEERS), st.booleans()),
        min_size=6,
        max_size=10,
    )
)
@settings(max_examples=60)
def test_no_message_costs_more_than_itself(rig: Rig, said: list[tuple[Message, tuple[str, int], bool]]) -> None:
    rig.meet()
    running = [rig.submit(name) for name in "ab"]
    for message, speaker, over_beat in said:
        rig.hear(connection_of(*speaker) + (BEAT_SUFFIX if over_beat else b""), message)
        rig.service._membership.check()
        rig.service.dispatcher.tick()
    for completion in running:
        rig.service.dispatcher.abort(completion)
        assert completion.is_terminal
    assert rig.service.dispatcher.queue_sizes() == (0, 0, 0)
    assert rig.service.pool.prefixes.num_reported <= 2 * 100, "of two pools"
    assert all((worker.work.outstanding_tokens, worker.work.num_assigned) == (0, 0) for worker in rig.service.pool)


def test_after_all_that_it_serves(rig: Rig) -> None:
    for worker in list(rig.service.pool):
        rig.service.pool.remove(worker)
    rig.meet()
    completion = rig.submit("last")
    assert completion.state is State.PREFILLING
    rig.service.dispatcher.abort(completion)
