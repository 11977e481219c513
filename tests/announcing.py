"""A memory server's announcer, for tests: of a router that is not there, if they name none."""

import itertools

from common.config import NetSection
from common.memory.announcer import Announcer
from common.wire.memory_reports import MemoryReady
from tests.fakes import free_endpoint

_epochs = itertools.count(1)


def announcer(net: NetSection | None = None, server_id: str = "memory") -> Announcer:
    net = net or NetSection(router_endpoint=free_endpoint())
    return Announcer(net, MemoryReady(server_id, next(_epochs), 1, "1", "cpu"))
