"""Messages that reach a router: each type with a handler, and no other."""

import asyncio
from pathlib import Path

from common.settings.config import Config, ModelSection, NetSection, RouterSection
from common.wire.messages.frames import TAGS
from router.service import Service
from tests.support.fakes import free_endpoint


def test_a_handler_is_there_for_every_message_to_a_router_and_for_no_other(model_dir: Path) -> None:
    net = NetSection(router_endpoint=free_endpoint())
    service = Service(Config(model=ModelSection(path=str(model_dir)), net=net, router=RouterSection(port=0)))
    try:
        received = {kind for kind in TAGS.values() if "-> router" in (kind.__doc__ or "").partition(":")[0]}
        assert service.handlers().keys() == received
    finally:
        asyncio.run(service.close())
