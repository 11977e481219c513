"""What a worker that ends says of it: why, and what follows, each once."""

import logging
import signal
from collections.abc import Iterator

import pytest

from common.serving.worker.drain import Drain

FINISHING = "taking nothing new, finishing what is here for at most 30 s"


@pytest.fixture
def drain(caplog: pytest.LogCaptureFixture) -> Iterator[Drain]:
    caplog.set_level(logging.INFO)
    usual = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    drain = Drain(30.0)
    drain.install()
    drain.has_started = True
    yield drain
    for number, handler in usual.items():
        signal.signal(number, handler)


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_signal_has_it_finish_what_it_has(drain: Drain, caplog: pytest.LogCaptureFixture) -> None:
    assert not drain.finished(owns_something=False) and not drain.begins()
    signal.raise_signal(signal.SIGTERM)
    assert drain.begins() and not drain.begins()
    assert not drain.finished(owns_something=True)
    assert drain.finished(owns_something=False)
    assert drain.reason == "SIGTERM"
    assert said(caplog) == [("INFO", f"SIGTERM: {FINISHING}")]


def test_so_does_who_asks_for_it_and_a_signal_more_ends_it(drain: Drain, caplog: pytest.LogCaptureFixture) -> None:
    drain.ask("baton drain")
    drain.ask("baton drain")
    assert drain.begins() and not drain.finished(owns_something=True)
    signal.raise_signal(signal.SIGINT)
    assert drain.finished(owns_something=True)
    assert said(caplog) == [
        ("WARNING", f"baton drain: {FINISHING}"),
        ("WARNING", "SIGINT: leaving at once; what is here goes on elsewhere"),
    ]


def test_at_once_it_says_why_though_it_has_nothing(drain: Drain, caplog: pytest.LogCaptureFixture) -> None:
    drain.ask("its device met a fault", at_once=True)
    assert drain.finished(owns_something=False)
    assert said(caplog) == [("WARNING", "its device met a fault: leaving at once")]


def test_what_is_late_goes_on_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    drain = Drain(0.0)
    drain.ask("baton drain")
    assert drain.begins() and drain.finished(owns_something=True)
    assert said(caplog)[-1] == ("WARNING", "not all is finished after 0 s; what is here goes on elsewhere")
