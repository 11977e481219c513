"""Each request explains itself in the log."""

import logging

import pytest

from common.base.errors import RequestError
from tests.router.bench import LENGTH, Bench


def test_the_log_has_a_line_for_people_and_fields_for_programs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench()
    completion = bench.submit(num_prompt_tokens=7, max_tokens=3)
    for index, worker in enumerate((bench.prefills[0], bench.decodes[0], bench.decodes[0])):
        bench.now_s += (0.5, 0.25, 2.0)[index]
        bench.token(worker, completion, index, 1, LENGTH if index == 2 else 0)
    (record,) = (record for record in caplog.records if hasattr(record, "fields"))
    assert record.getMessage() == (
        "[cmpl-1] finished length: 7 prompt tokens, 0 cached, 3 output tokens, 1 attempts, ttft 500 ms, e2e 2750 ms: "
        "queued 0, prefill 500, handoff 250, decode 2000, p0 -> d0, the only pair with room"
    )
    assert record.fields == {
        "request_id": "cmpl-1", "client_request_id": "", "state": "finished", "finish_reason": "length",
        "error": None, "prompt_tokens": 7, "expected_cached_tokens": 0, "output_tokens": 3, "index": 0, "attempts": 1,
        "read_ms": 0.0, "queued_ms": 0.0, "prefill_ms": 500.0, "handoff_ms": 250.0, "decode_ms": 2000.0,
        "ttft_ms": 500.0, "e2e_ms": 2750.0, "cached_tokens": 0, "prefill_worker": "p0", "decode_worker": "d0",
        "kv_path": "shm", "route": "the only pair with room",
    }  # fmt: skip


def test_what_never_came_to_a_worker_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(num_decode=0)
    completion = bench.submit()
    bench.now_s += 3
    bench.dispatcher.abort(completion)
    assert completion.timing is not None
    assert (completion.timing["queued_ms"], completion.timing["route"]) == (3000.0, "no worker")
    assert "aborted, as nobody wants it any more: 4 prompt tokens" in caplog.text and "ttft none" in caplog.text
    bench.submit()
    bench.dispatcher.fail_all(RequestError("no", code="server_draining", status=503))
    assert "failed server_draining: 4 prompt tokens" in caplog.text
