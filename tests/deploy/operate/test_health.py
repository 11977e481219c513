from typing import Any

import pytest

from deploy.operate.health import is_complete, local_url, transports


def body(kv_paths: list[dict[str, Any]], status: str = "ok") -> dict[str, Any]:
    worker = {"pid": 1, "device": "cpu", "transport": "shm", "standby": None}
    return {
        "status": status,
        "problems": [],
        "workers": {"prefill": [{"id": "p", **worker}], "decode": [{"id": "d", **worker}, {"id": "e", **worker}]},
        "kv_paths": kv_paths,
    }


def path(decode: str, gb_per_s: float, error: str = "") -> dict[str, Any]:
    return {"prefill": "p", "decode": decode, "transport": "shm", "gb_per_s": gb_per_s, "error": error}


def test_health_is_complete_when_every_path_was_tried() -> None:
    assert not is_complete(body([path("d", 3.0)]))
    assert is_complete(body([path("d", 3.0), path("e", 5.0)]))
    assert is_complete(body([path("d", 3.0), path("e", 0.0, "no shared memory")]))
    assert not is_complete(body([path("d", 3.0), path("e", 5.0)], status="unavailable"))
    assert is_complete(body([path("d", 3.0), path("e", 5.0)], status="degraded"))


def test_transport_in_words() -> None:
    assert transports(body([path("d", 3.0), path("e", 5.0)])) == "shm at 3.0-5.0 GB/s"
    assert transports(body([path("d", 3.0), path("e", 0.0, "broken")])) == "shm at 3.0 GB/s"
    shared = path("e", 0.0) | {"transport": "shared pool", "gb_per_s": None}
    assert transports(body([shared])) == "shared pool"
    assert transports(body([path("d", 3.0), shared])) == "shared pool, shm at 3.0 GB/s"
    assert transports(body([])) == "none"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("box", "http://box:80"),
    ],
)
def test_local_url(host: str, expected: str) -> None:
    assert local_url(host, 80) == expected
