"""A loop that had something to do sleeps for moments; later, and where cores are scarce, until a message comes."""

from unittest.mock import create_autospec

import pytest
import zmq

from common.memory.vigil import AWAKE_S, MIN_CORES
from common.serving.idling import Idling


@pytest.mark.parametrize(("on_gpu", "num_cores"), [(True, MIN_CORES), (True, MIN_CORES - 1), (False, MIN_CORES)])
def test_only_who_worked_lately_stays_awake(on_gpu: bool, num_cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(num_cores)))
    stays_awake = on_gpu and num_cores == MIN_CORES
    now_s = 100.0
    poller = create_autospec(zmq.Poller, instance=True)
    poller.poll.return_value = []
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
