"""A memory server's announcer, for tests: of a router that is not there, if they name none."""

import itertools

from common.memory.server.announcer import Announcer
from common.settings.config import NetSection
from common.wire.messages.memory_reports import MemoryReady
from tests.support.fakes import free_endpoint

_epochs = itertools.count(1)


def announcer(net: NetSection | None = None, server_id: str = "memory") -> Announcer:
    net = net or NetSection(router_endpoint=free_endpoint())
    return Announcer(net, MemoryReady(server_id, next(_epochs), 1, "1", "cpu"))
