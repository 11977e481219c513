"""Clients that ask the same again and again, and compare each answer with the first one."""

import threading
import time
from collections import Counter
from typing import Any

import openai

PROMPTS = (
    "First Citizen:", "ROMEO:\nBut soft, what light", "JULIET:\n", "KING RICHARD III:\nNow is the",
    "MENENIUS:\nWhat work's, my countrymen,", "The sea " * 60, "Nurse:\nMarry, that", "LEONTES:\nToo hot, too hot!",
)  # fmt: skip
MAX_TOKENS = 96
DEADLINE_S = 300.0
"""For one answer, retries included."""
CUT_OFF = "before this request was finished"
"""As the router puts it."""


class CutOff(ConnectionError):
    """A stream without its end."""


class Load:
    """Counts by what is going on: answers, other texts than expected, and errors that a client met.

    Args:
        url: of the router.
        may_retry: whether clients go on after an error by which what they asked was not begun.
    """

    def __init__(self, url: str, num_clients: int) -> None:
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)
        self.phase = "start"
        self.may_retry = False
        self.answers: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.expected = [self._text(index, stream=False) for index in range(len(PROMPTS))]
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(num_clients)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait for what is under way."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def until_answers(self, phase: str, number: int) -> None:
        """Let that many come while this goes on; raises TimeoutError."""
        self.phase = phase
        until_s = time.monotonic() + DEADLINE_S
        before = self.answers[phase]
        while self.answers[phase] - before < number and not self.wrong:
            if time.monotonic() > until_s:
                raise TimeoutError(f"{phase}: {self.answers[phase]} answers, {dict(self.retries)} retries")
            time.sleep(0.05)

    def _ask(self, number: int) -> None:
        turn = number
        while not self._over.is_set():
            turn += 1
            index, stream = turn % len(PROMPTS), turn % 3 > 0
            text = self._retried(index, stream=stream)
            if text != self.expected[index]:
                self.wrong.append(f"{self.phase}: {PROMPTS[index]!r:.40} has {text!r:.300}")
            self.answers[self.phase] += 1

    def _retried(self, index: int, *, stream: bool) -> str:
        until_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                return self._text(index, stream=stream)
            except (openai.APIError, ConnectionError) as error:
                if not self.may_retry or _was_cut_off(error) or time.monotonic() > until_s:
                    return f"{type(error).__name__}: {error}"
                self.retries[self.phase] += 1
                time.sleep(0.5)

    def _text(self, index: int, *, stream: bool) -> str:
        request: dict[str, Any] = {"model": "demo_model", "prompt": PROMPTS[index], "max_tokens": MAX_TOKENS}
        asked: Any = self.client.completions.create(**request, temperature=0, stream=stream)
        if not stream:
            return str(asked.choices[0].text)
        chunks = [chunk.choices[0] for chunk in asked]
        if not chunks or chunks[-1].finish_reason is None:
            raise CutOff("the stream ended before the text did")
        return "".join(chunk.text for chunk in chunks)


def _was_cut_off(error: Exception) -> bool:
    """Whether the answer was under way: its stream ended, or the router says so."""
    return isinstance(error, CutOff) or CUT_OFF in str(error)
