import asyncio
import time

import pytest
import zmq

from common.settings.config import NetSection
from common.wire.messages.worker import Heartbeat, Message, Reregister
from common.wire.transport.sockets import MAX_RECEIVED_AT_ONCE, Spoke
from router.workers.hub import MAX_TURN_S, MAX_WORKER_FRAME_BYTES, AsyncHub, Undelivered
from tests.support.fakes import free_endpoint
from tests.support.messages import heartbeat

NUM_MESSAGES = 3 * MAX_RECEIVED_AT_ONCE


@pytest.mark.medium
@pytest.mark.parametrize("answering", [False, True])
async def test_everything_arrives_though_the_edge_comes_once(caplog: pytest.LogCaptureFixture, answering: bool) -> None:
    """More than one receive takes, one of them fatal to its handler, with or without sends on the way."""
    hub = AsyncHub(NetSection(), free_endpoint())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    spoke = Spoke(context, NetSection(), hub.endpoint, b"w.1")
    received: list[int] = []
    unreachable: list[Undelivered] = []

    def on_message(identity: bytes, message: Message) -> None:
        assert isinstance(message, Heartbeat)
        received.append(message.num_waiting)
        if answering:
            hub.send(identity, Reregister(message.num_waiting))
        if message.num_waiting == 5:
            raise RuntimeError("a bug")

    try:
        for i in range(NUM_MESSAGES):
            spoke.send(heartbeat("w", num_waiting=i))
        await asyncio.sleep(0.3)  # all of them wait in the hub's queue before its first receive
        hub.start({Heartbeat: on_message}, unreachable.append)
        undelivered: Undelivered = [(b"nobody", Reregister(0)), (b"nobody else", Reregister(1))]
        for identity, message in undelivered:
            hub.send(identity, message)
        async with asyncio.timeout(60):
            while len(received) < NUM_MESSAGES:
                await asyncio.sleep(0.01)
        assert received == list(range(NUM_MESSAGES))
        answers: list[Message] = []
        async with asyncio.timeout(60):
            while answering and len(answers) < NUM_MESSAGES:
                answers += spoke.receive()
                await asyncio.sleep(0.01)
    finally:
        spoke.close()
        hub.close()
        context.destroy(linger=0)
    assert "a bug" in caplog.text
    assert unreachable == [undelivered], "all of them at once"
    assert hub.num_dropped == 2


async def test_clients_have_a_turn_between_messages_that_take_long() -> None:
    hub = AsyncHub(NetSection(), free_endpoint())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    spoke = Spoke(context, NetSection(), hub.endpoint, b"w.1")
    order: list[str] = []

    def on_message(identity: bytes, message: Message) -> None:
        order.append("message")
        asyncio.get_running_loop().call_soon(order.append, "client")
        time.sleep(2 * MAX_TURN_S)

    try:
        for i in range(4):
            spoke.send(heartbeat("w", num_waiting=i))
        await asyncio.sleep(0.3)
        hub.start({Heartbeat: on_message}, lambda _: None)
        async with asyncio.timeout(60):
            while len(order) < 8:
                await asyncio.sleep(0.01)
        assert "client" in order[:4]
    finally:
        spoke.close()
        hub.close()
        context.destroy(linger=0)


async def test_a_frame_larger_than_any_worker_sends_is_not_even_read() -> None:
    hub = AsyncHub(NetSection(), free_endpoint())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    received: list[bytes] = []
    spokes = [Spoke(context, NetSection(), hub.endpoint, name) for name in (b"large.1", b"small.1")]
    try:
        hub.start({Heartbeat: lambda identity, _: received.append(identity)}, lambda _: None)
        spokes[0].socket.send(bytes(MAX_WORKER_FRAME_BYTES + 1))
        await asyncio.sleep(0.1)
        spokes[1].send(heartbeat("small"))
        async with asyncio.timeout(60):
            while not received:
                await asyncio.sleep(0.01)
    finally:
        for spoke in spokes:
            spoke.close()
        hub.close()
        context.destroy(linger=0)
    assert received == [b"small.1"] and hub.num_dropped == 0


async def test_only_messages_with_a_handler_and_of_the_connections_owner_are_handled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub = AsyncHub(NetSection(), free_endpoint())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    spoke = Spoke(context, NetSection(), hub.endpoint, b"w.1")
    received: list[Message] = []
    try:
        hub.start({Heartbeat: lambda _, message: received.append(message)}, lambda _: None)
        for message in (Reregister(1), heartbeat("x"), heartbeat("w", epoch=2), heartbeat("w")):
            spoke.send(message)
        async with asyncio.timeout(60):
            while not received:
                await asyncio.sleep(0.01)
    finally:
        spoke.close()
        hub.close()
        context.destroy(linger=0)
    assert received == [heartbeat("w")] and hub.num_dropped == 3
    assert "Reregister" in caplog.text and "a router does not receive it" in caplog.text
