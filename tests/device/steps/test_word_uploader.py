"""Words that the host writes where the device reads them: what was launched last is not written over."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from common.device.steps.word_uploader import FIRST_WORDS, WordStage


class Device:
    """Counts what is launched; an event waits for what was launched before it was recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_launched = self.num_awaited = 0
        monkeypatch.setattr(torch.cuda, "Event", self._event)
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **kwargs: empty(*args, **kwargs))

    def _event(self) -> Any:
        event = SimpleNamespace(recorded=0)

        def record() -> None:
            event.recorded = self.num_launched

        def synchronize() -> None:
            self.num_awaited = max(self.num_awaited, event.recorded)

        event.record, event.synchronize = record, synchronize
        return event


@pytest.mark.parametrize("says_so", [True, False], ids=["after each launch", "never"])
def test_a_buffer_is_filled_again_when_what_read_it_is_over(monkeypatch: pytest.MonkeyPatch, says_so: bool) -> None:
    device = Device(monkeypatch)
    stage = WordStage(cast(torch.device, SimpleNamespace(type="cuda")))
    read_by: dict[int, int] = {}  # buffer: the last launch that reads it
    for number in range(1, 9):
        buffer = stage.room(FIRST_WORDS + 1 if number > 4 else 5)
        assert device.num_awaited >= read_by.get(id(buffer), 0)
        assert device.num_awaited < max(number - 1, 1), "the last launch is not waited for"
        device.num_launched = read_by[id(buffer)] = number
        if says_so:
            stage.launched()
            stage.launched()


def test_a_buffer_has_room_for_what_it_is_asked_for_and_is_one_memory() -> None:
    stage = WordStage(torch.device("cpu"))
    for num_words in (1, FIRST_WORDS, FIRST_WORDS + 1, 5 * FIRST_WORDS, 7):
        buffer = stage.room(num_words)
        assert len(buffer.array) == buffer.words.numel() >= num_words
        buffer.array[num_words - 1] = num_words
        assert int(buffer.words[num_words - 1]) == num_words
