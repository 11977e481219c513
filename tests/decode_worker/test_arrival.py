import time
from collections.abc import Iterable

from common.base.trace_events import Key
from common.device.steps.loop_trace import Trace
from tests.support.sequences import decode_sequence


class Heard(Trace):
    """Keeps what it is told of requests."""

    def __init__(self) -> None:
        self.stretches: list[tuple[str, Key, float, float]] = []
        self.joined: list[Key] = []

    def join(self, keys: Iterable[Key]) -> None:
        self.joined += keys

    def stretch(self, name: str, key: Key, begin_s: float, end_s: float) -> None:
        self.stretches.append((name, key, begin_s, end_s))


def arrived(claimed_s: float) -> Heard:
    sequence, heard = decode_sequence("cmpl-1", [1, 2, 3], 1, attempt=2), Heard()
    sequence.offered_s, sequence.claimed_s = 1.0, claimed_s
    sequence.trace_arrival(heard)
    assert heard.joined == [("cmpl-1", 2)]
    return heard


def test_a_prompt_in_our_own_pool_has_waited_until_now() -> None:
    [(name, key, begin_s, end_s)] = arrived(0.0).stretches
    assert (name, key, begin_s) == ("handoff", ("cmpl-1", 2), 1.0)
    assert 0 <= time.monotonic() - end_s < 60


def test_a_prompt_in_another_pool_has_waited_and_was_pulled() -> None:
    handoff, pull = arrived(2.0).stretches
    assert handoff == ("handoff", ("cmpl-1", 2), 1.0, 2.0)
    assert pull[:3] == ("pull", ("cmpl-1", 2), 2.0)
