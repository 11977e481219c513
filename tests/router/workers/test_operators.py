"""Who is to leave hears of it, and is not told again and again."""

from types import SimpleNamespace
from typing import Any

import pytest

from common.settings.config import NetSection
from common.wire.messages.memory_reports import MemoryReady
from common.wire.messages.operator import DrainAnswer, DrainWanted, Leave
from common.wire.messages.worker import Message, Role
from router.placement.worker_pool import WorkerPool
from router.workers.hub import Links
from router.workers.memory_servers import MemoryServers
from router.workers.operators import ASK_AGAIN_S, Operators
from tests.support.messages import worker_ready


@pytest.mark.parametrize("name", ["memory-0", "decode-0"])
def test_who_is_to_leave_hears_of_it_once_and_seldom_again(name: str) -> None:
    now_s, sent = 100.0, list[Message]()

    def send(connection: bytes, message: Message) -> bool:
        sent.append(message)
        return True

    net = NetSection()
    pool, servers = WorkerPool(net, 2.0), MemoryServers(Links(net, 1, send, lambda: now_s))
    dispatcher: Any = SimpleNamespace(lifecycle=SimpleNamespace(needing=lambda worker: []))
    operators = Operators(pool, servers, dispatcher, send, lambda: now_s)

    def begins(epoch: int) -> None:
        if name == "memory-0":
            servers.on_ready(b"", MemoryReady(name, epoch, 1, "1", "cpu"))
        else:
            pool.add(worker_ready(name, Role.DECODE, epoch=epoch), now_s)

    def asked(epoch: int = 0) -> list[type[Message]]:
        sent.clear()
        operators.on_drain_wanted(b"operator", DrainWanted("operator", 1, name, epoch))
        return [type(message) for message in sent]

    assert asked() == [DrainAnswer], "there is none"
    begins(7)
    assert asked() == [Leave, DrainAnswer] and asked(7) == [DrainAnswer]
    now_s += 0.9 * ASK_AGAIN_S
    assert asked(7) == [DrainAnswer]
    now_s += 0.2 * ASK_AGAIN_S
    assert asked(7) == [Leave, DrainAnswer], "it has perhaps not heard"
    begins(8)
    assert asked(7) == [DrainAnswer], "that is the next one"
    assert asked(8) == [Leave, DrainAnswer]
