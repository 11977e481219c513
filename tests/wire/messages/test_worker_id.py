import os
import socket

import pytest

from common.wire.messages.worker_id import make_id


def test_workers_with_one_process_id_in_two_containers_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = []
    for host in ("c3eba8a3d162", "3a23965eb2f7"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        ids.append(make_id("decode", ""))
    assert ids == [f"decode-c3eba8a3d162-{os.getpid()}", f"decode-3a23965eb2f7-{os.getpid()}"]


def test_a_configured_name_is_taken_as_it_is() -> None:
    assert make_id("prefill", "left") == "left"
