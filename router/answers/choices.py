"""Answers of the APIs with choices, completions and chats: whole and streamed."""

import json
from collections.abc import Awaitable, Callable, Iterable

from msgspec import structs

from common.base.json_file import JsonObject
from router.answers.completion_bodies import DONE, NO_PARTS, ChunkWriter, choice_json, event, warnings_json
from router.answers.request_choices import Job
from router.dispatch.completion.choice import Choice, Delivery
from router.http.errors import error_body
from router.requests.completion_api import ResponseOptions

ChoiceBody = Callable[[str, Choice, ResponseOptions], Awaitable[JsonObject]]
"""Coroutine function from the whole text to a choice."""
PromptBody = Callable[[Choice, ResponseOptions], JsonObject]
"""Function to the fields about a prompt, beside the prompt's choices."""


class WholeChoices:
    """The body of a response without streaming."""

    def __init__(self, job: Job, choice_body: ChoiceBody, prompt_body: PromptBody | None = None) -> None:
        self._job = job
        self._choice_body = choice_body
        self._prompt_body = prompt_body
        self._texts: list[list[str]] = [[] for _ in job.choices]

    def add(self, delivery: Delivery) -> None:
        self._texts[delivery.choice].append(delivery.text)

    async def body(self) -> str:
        """Return the JSON, once all completions have ended."""
        job = self._job
        bodies = []
        for text, choice in zip(self._texts, job.choices, strict=True):
            body = await self._choice_body("".join(text), choice, job.options)
            bodies.append(choice_json(body, await job.shaper.parts(choice)))
        listed, warnings = ", ".join(bodies), warnings_json(job.options)
        head = job.head | (self._prompt_body(job.choices[0], job.options) if self._prompt_body else {})
        return f'{json.dumps(head)[:-1]}, "choices": [{listed}], "usage": {json.dumps(job.usage)}{warnings}}}'


class StreamedChoices:
    """Server-sent events: a chunk for each delivery, then `[DONE]`."""

    def __init__(self, job: Job, writer: type[ChunkWriter]) -> None:
        self._job = job
        self._writers = [writer(job.head, job.options, choice) for choice in job.choices]
        self._echoes_logprobs = job.options.num_echoed_logprobs > 0

    async def events(self, deliveries: list[Delivery]) -> bytes:
        """Return events of the deliveries; for a slow client, texts of a choice are merged into an event."""
        if self._echoes_logprobs:
            await self._shape_prompts(deliveries)
        if len(deliveries) > len(self._writers):
            deliveries = _merged_texts(deliveries)
        return b"".join([self._event(delivery) for delivery in deliveries])

    def end(self, *, is_complete: bool) -> bytes:
        """Return the stream's last bytes; `is_complete` is false after an error."""
        return (self._usage_event() if is_complete else b"") + DONE

    def _event(self, delivery: Delivery) -> bytes:
        if delivery.error is not None:
            return event(error_body(delivery.error))
        return self._writers[delivery.choice].chunk(delivery)

    async def _shape_prompts(self, deliveries: Iterable[Delivery]) -> None:
        """Shape prompt log-probabilities for choices before the first event."""
        for delivery in deliveries:
            writer = self._writers[delivery.choice]
            if delivery.error is None and writer.prompt is NO_PARTS:
                writer.prompt = await self._job.shaper.parts(self._job.choices[delivery.choice])

    def _usage_event(self) -> bytes:
        """Return the chunk with the usage, if requested."""
        job = self._job
        return event({**job.head, "choices": [], "usage": job.usage}) if job.options.include_usage else b""


def _merged_texts(deliveries: list[Delivery]) -> list[Delivery]:
    last: dict[int, Delivery] = {}
    for delivery in deliveries:
        before = last.get(delivery.choice)
        last[delivery.choice] = structs.replace(delivery, text=before.text + delivery.text) if before else delivery
    return list(last.values())
