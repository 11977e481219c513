"""A loop that had something to do sleeps for moments; later, and where cores are scarce, until a message comes."""

import selectors
import socket
from collections.abc import Iterator
from contextlib import closing
from unittest.mock import create_autospec

import pytest
import zmq

from common.memory.base.poller import AWAKE_S, MIN_CORES, AwakeSelector
from common.serving.worker.idling import Idling


@pytest.mark.parametrize(("on_gpu", "num_cores"), [(True, MIN_CORES), (True, MIN_CORES - 1), (False, MIN_CORES)])
def test_only_who_worked_lately_stays_awake(on_gpu: bool, num_cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(num_cores)))
    stays_awake = on_gpu and num_cores == MIN_CORES
    now_s = 100.0
    poller = create_autospec(zmq.Poller, instance=True)
    poller.poll.return_value, poller.sockets = [], []
    idling = Idling(poller, on_gpu=on_gpu, clock=lambda: now_s)
    assert not idling.await_message(7), "it has not worked yet"
    poller.poll.assert_called_once_with(7)
    assert idling.num_vain == 1
    idling.worked()
    now_s += 0.9 * AWAKE_S
    assert idling.await_message(7) is stays_awake
    assert poller.poll.call_count == (1 if stays_awake else 2)
    now_s += 0.2 * AWAKE_S
    poller.poll.return_value = [object()]
    assert idling.await_message(7)
    assert idling.num_vain == 0
    assert poller.poll.call_count == (2 if stays_awake else 3)


@pytest.fixture
def endless_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sleeps for one does not come back."""
    monkeypatch.setattr("common.memory.base.poller.MOMENT_S", None)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(MIN_CORES)))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.mark.usefixtures("endless_moments")
def test_a_message_ends_a_worker_s_moment(ends: tuple[socket.socket, socket.socket]) -> None:
    """Of either kind of socket, again and again."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with closing(context.socket(zmq.PAIR)) as sender, closing(context.socket(zmq.PAIR)) as receiver:
        sender.bind("inproc://moment")
        receiver.connect("inproc://moment")
        poller = zmq.Poller()
        poller.register(receiver, zmq.POLLIN)
        poller.register(ends[1], zmq.POLLIN)
        idling = Idling(poller, on_gpu=True, clock=lambda: 0.0)
        idling.worked()
        for _ in range(3):
            sender.send(b"x")
            while not receiver.poll(0):
                assert idling.await_message(7)
            assert receiver.recv() == b"x"
            ends[0].send(b"y")
            assert idling.await_message(7) and ends[1].recv(1) == b"y"


@pytest.mark.usefixtures("endless_moments")
def test_a_message_ends_the_memory_server_s_moment(ends: tuple[socket.socket, socket.socket]) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(ends[1], selectors.EVENT_READ, "data")
        vigil = AwakeSelector(selector, AWAKE_S)
        for _ in range(3):
            ends[0].send(b"x")
            assert [key.data for key in vigil.select(7.0)] == ["data"] and ends[1].recv(1) == b"x"
