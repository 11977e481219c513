"""Whatever a front says, it costs no more than its own session."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.settings.config import Config, ModelSection, NetSection, RouterSection
from common.wire.messages.frames import decode, encode
from common.wire.messages.fronts import FrontDone, FrontHello, FrontOrder, FrontPrompt
from common.wire.messages.worker import Message
from common.wire.messages.worker_id import connection_of
from router.service import Service
from tests.support.fakes import FakeModel, free_endpoint
from tests.wire.strategies import messages

FRONT = ("front", 1)


def hello(model: FakeModel, epoch: int) -> FrontHello:
    return FrontHello(FRONT[0], epoch, 1, "1", model.name, model.fingerprint, model.tokenizer_fingerprint, "")


@pytest.mark.medium
@given(st.lists(st.tuples(messages(), st.booleans()), min_size=4, max_size=12))
@settings(max_examples=60, deadline=None)
def test_no_message_of_a_front_costs_more_than_its_session(
    model_dir: Path, model: FakeModel, said: list[tuple[Message, bool]]
) -> None:
    asyncio.run(_hear(model_dir, model, said))


async def _hear(model_dir: Path, model: FakeModel, said: list[tuple[Message, bool]]) -> None:
    net, limits = NetSection(router_endpoint=free_endpoint()), RouterSection(port=0, front_endpoint=free_endpoint())
    service = Service(Config(model=ModelSection(path=str(model_dir)), net=net, router=limits))
    assert service.fronts is not None
    handlers, connection = service.fronts.handlers(), connection_of(*FRONT)
    number = 0
    try:
        for message, is_numbered in [(hello(model, FRONT[1]), False), *said]:
            fields: dict[str, Any] = {}
            if hasattr(message, "front_id"):
                fields = {"front_id": FRONT[0], "epoch": FRONT[1]}
            if is_numbered and isinstance(message, FrontPrompt | FrontOrder | FrontDone):
                number += 1
                fields["number"] = number
            if (handler := handlers.get(type(message))) is not None:
                handler(connection, decode(encode(replace(message, **fields))))
            await asyncio.sleep(0)
            service.fronts.check()
            service.dispatcher.tick()
        service.fronts.on_hello(connection, hello(model, FRONT[1]))
        assert len(service.fronts) == 1
        service.fronts.on_hello(connection, hello(model, 2))
        for _ in range(100):
            await asyncio.sleep(0)
        assert service.dispatcher.queue_sizes() == (0, 0, 0), "the completions of a session end with it"
    finally:
        await service.close()
