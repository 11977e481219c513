"""Answers of /v1/responses, whole and streamed."""

import json
import time
from collections.abc import Sequence

from common.base.errors import RequestError
from common.base.json_file import Json, JsonObject
from router.answers.request_choices import Job
from router.answers.responses_output import COMPLETED, IN_PROGRESS, INCOMPLETE, Event, Output
from router.dispatch.completion.choice import Delivery

DELTAS = (
    "response.output_text.delta",
    "response.reasoning_text.delta",
    "response.reasoning_summary_text.delta",
    "response.function_call_arguments.delta",
)
GROWING = {"delta", "logprobs"}
"""Fields of deltas, joined when deltas merge."""
FAILED = "failed"


class WholeResponse:
    """The body of a response without streaming."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._output = _output(job)

    def add(self, delivery: Delivery) -> None:
        self._output.add(delivery)

    async def body(self) -> str:
        """Return the JSON, once the answer is over."""
        return _ended(self._job, self._output)[1]


class StreamedResponse:
    """Server-sent events, numbered, each named by its type."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._output = _output(job)
        self._num_sent = 0

    async def events(self, deliveries: list[Delivery]) -> bytes:
        """Return events of the deliveries; consecutive deltas of an item are merged."""
        written = []
        if not self._num_sent:
            begun = _snapshot(self._job, IN_PROGRESS, [])
            written += [self._about(f"response.{step}", begun) for step in ("created", IN_PROGRESS)]
        error = next((delivery.error for delivery in deliveries if delivery.error is not None), None)
        events = [event for delivery in deliveries if delivery.error is None for event in self._output.add(delivery)]
        written += [self._event(event.kind, json.dumps(event.fields)[1:-1]) for event in _merged_deltas(events)]
        if error is not None:
            failed = _snapshot(self._job, FAILED, self._output.items, error=_error(error))
            written.append(self._about(f"response.{FAILED}", failed))
        elif any(delivery.finish_reason is not None for delivery in deliveries):
            status, ended = _ended(self._job, self._output)
            written.append(self._about(f"response.{status}", ended))
        return b"".join(written)

    def end(self, *, is_complete: bool) -> bytes:
        """Return nothing, because the last event has the final status."""
        return b""

    def _about(self, kind: str, snapshot: str) -> bytes:
        return self._event(kind, f'"response": {snapshot}')

    def _event(self, kind: str, fields: str) -> bytes:
        number = self._num_sent
        self._num_sent += 1
        event = f'event: {kind}\ndata: {{"type": "{kind}", "sequence_number": {number}, {fields}}}\n\n'
        return event.encode("ascii")


def _output(job: Job) -> Output:
    (choice,) = job.choices
    return Output(job.options, choice)


def _ended(job: Job, output: Output) -> tuple[str, str]:
    """Return status and JSON of a response with a finished answer."""
    (choice,) = job.choices
    usage = job.usage
    is_cut = choice.output.finish_reason == "length"
    status = INCOMPLETE if is_cut else COMPLETED
    result: JsonObject = {
        "completed_at": None if is_cut else int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": output.num_thought_tokens},
            "total_tokens": usage["total_tokens"],
        },
    }
    return status, _snapshot(job, status, output.items, **result)


def _snapshot(job: Job, status: str, output: Sequence[JsonObject], **result: Json) -> str:
    """Return the JSON of the response's current state; `result` has fields null before the end."""
    nothing_yet = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
    warnings = {"warnings": job.options.warnings} if job.options.warnings else {}
    fields = {"status": status, "output": output, **nothing_yet, **result, **warnings}
    return f"{json.dumps(job.head)[:-1]}, {job.options.repeated[1:-1]}, {json.dumps(fields)[1:]}"


def _error(error: RequestError) -> dict[str, str]:
    """Return the error of a failed response, with the nearest code of OpenAI."""
    code = "rate_limit_exceeded" if error.status == 429 else "server_error" if error.status >= 500 else "invalid_prompt"
    return {"code": code, "message": error.message}


def _merged_deltas(events: Sequence[Event]) -> list[Event]:
    """Return the events, with consecutive deltas of an item merged into a single delta."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if last is None or event.kind not in DELTAS or last.kind != event.kind:
            merged.append(event)
            continue
        joined: JsonObject = {name: last.fields[name] + event.fields[name] for name in GROWING & event.fields.keys()}
        merged[-1] = Event(event.kind, event.fields | joined)
    return merged
