"""Who is to leave hears of it, and is not told again and again."""

from typing import cast

from common.config import NetSection
from common.wire.memory_reports import MemoryReady
from common.wire.messages import Message
from common.wire.operator_messages import DrainAnswer, DrainWanted, Leave
from router.dispatcher import Dispatcher
from router.memory_servers import MemoryServers
from router.operators import ASK_AGAIN_S, Operators
from router.role_changes import RoleChanges
from router.worker_pool import WorkerPool


def test_a_memory_server_is_asked_to_leave_once_and_seldom_again() -> None:
    now_s, sent = 100.0, list[Message]()

    def send(connection: bytes, message: Message) -> bool:
        sent.append(message)
        return True

    net = NetSection()
    servers = MemoryServers(net, 1, send, lambda: now_s)
    operators = Operators(
        WorkerPool(net, 2.0), servers, cast(Dispatcher, None), cast(RoleChanges, None), send, lambda: now_s
    )

    def asked(epoch: int = 0) -> list[type[Message]]:
        sent.clear()
        operators.heed(b"operator", DrainWanted("operator", 1, "memory-0", epoch))
        return [type(message) for message in sent]

    assert asked() == [DrainAnswer], "there is none"
    servers.on_ready(b"", MemoryReady("memory-0", 7, 1, "1", "cpu"))
    assert asked() == [Leave, DrainAnswer] and asked(7) == [DrainAnswer]
    now_s += 0.9 * ASK_AGAIN_S
    assert asked(7) == [DrainAnswer]
    now_s += 0.2 * ASK_AGAIN_S
    assert asked(7) == [Leave, DrainAnswer], "it has perhaps not heard"
    servers.on_ready(b"", MemoryReady("memory-0", 8, 1, "1", "cpu"))
    assert asked(7) == [DrainAnswer], "that is the next one"
    assert asked(8) == [Leave, DrainAnswer]
