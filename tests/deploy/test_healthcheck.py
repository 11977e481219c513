from typing import Any

import pytest

from deploy.healthcheck import main, problem


def body(status: str, missing: list[str]) -> dict[str, Any]:
    return {"status": status, "missing": missing, "workers": {"prefill": [{"id": "p"}], "decode": []}}


def test_a_router_is_healthy_when_it_can_serve() -> None:
    assert problem(body("ok", []), "") == ""
    assert problem(body("unavailable", ["no decode worker"]), "") == "unavailable: no decode worker"


def test_a_worker_is_healthy_when_the_router_knows_it() -> None:
    assert problem(body("unavailable", []), "p") == ""
    assert problem(body("ok", []), "d") == "the router does not know d"


def test_nobody_there_is_unhealthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["http://127.0.0.1:9"]) == 1
    assert "refused" in capsys.readouterr().out
