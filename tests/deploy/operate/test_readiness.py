"""Waiting for a router ends when requests are answered, and says at the deadline what was wrong."""

import json

import pytest

from deploy.operate import healthcheck
from deploy.operate.healthcheck import OTHERS_ANSWER, wait_until_ready
from tests.support.answering import answering

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


def answer(status: str, *problems: str) -> bytes:
    return HEAD + json.dumps({"status": status, "problems": problems}).encode()


def test_who_waits_is_told_what_was_wrong_last(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no router answers at http://127.0.0.1:9: " in wait_until_ready("http://127.0.0.1:9", 0.0)
    with answering(answer("unavailable", "no decode worker takes requests")) as url:
        assert wait_until_ready(url, 0.0) == "unavailable: no decode worker takes requests"
    with answering(HEAD + b"{}") as url:
        assert OTHERS_ANSWER in wait_until_ready(url, 0.0)


def test_ready_is_that_requests_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(answer("ok")) as url:
        assert wait_until_ready(url, 100.0) == ""
    with answering(answer("degraded", "no prefill worker serves")) as url:
        assert wait_until_ready(url, 0.0) == "", "at the deadline it is enough"
    monkeypatch.setattr(healthcheck, "SETTLING_S", 0.0)
    with answering(answer("degraded", "no prefill worker serves")) as url:
        assert wait_until_ready(url, 100.0) == ""


def test_a_router_that_comes_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    answers = iter([OSError("refused"), {"status": "unavailable", "problems": []}, {"status": "ok", "problems": []}])

    def fetch(url: str) -> object:
        asked.append(url)
        found = next(answers)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(healthcheck, "fetch", fetch)
    monkeypatch.setattr(healthcheck, "ASK_INTERVAL_S", 0.0)
    assert wait_until_ready("http://x", 100.0) == "" and len(asked) == 3
