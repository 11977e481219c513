"""Summary of an ended completion: written to the log, and shown on the status page."""

import logging
import time
from collections import deque
from collections.abc import Callable
from heapq import heappush, heapreplace, nlargest
from typing import NamedTuple

from common.base.json_file import JsonObject
from router.dispatch.completion.journey import End, Phase, Timing
from router.dispatch.completion.state import Completion, State

logger = logging.getLogger(__name__)


def log_end(completion: Completion, now_s: float, error_code: str = "") -> None:
    """Log a completion just after the end, while the route is known: sizes and times, never text."""
    timing = completion.timing = timing_of(completion, now_s)
    summary = {
        "request_id": completion.spec.request_id,
        "client_request_id": completion.spec.client_request_id,
        "state": completion.state.value,
        "finish_reason": completion.output.finish_reason or None,
        "error": error_code or None,
        "prompt_tokens": len(completion.spec.prompt_ids),
        "expected_cached_tokens": _num_expected(completion),
        "output_tokens": len(completion.output.token_ids),
    }
    line = _line(completion, timing, error_code)
    logger.info("[%s] %s", completion.spec.request_id, line, extra={"fields": summary | timing})
    if completion.journey is not None:
        completion.journey.end(End(now_s, summary | timing))


def timing_of(completion: Completion, now_s: float) -> Timing:
    """Tell where the time of a completion went, until now if the completion is running."""
    times, route = completion.times, completion.attempt.route
    seconds = times.phases.until(now_s)
    ttft_s = times.first_token_s - times.submitted_s if times.first_token_s else None
    return {
        "index": completion.spec.index,
        "attempts": completion.attempt.number + 1,
        "read_ms": _ms(times.submitted_s - times.received_s) if times.received_s else 0.0,
        "queued_ms": _ms(seconds.get(Phase.QUEUED, 0.0)),
        "prefill_ms": _ms(seconds.get(Phase.PREFILL, 0.0)),
        "handoff_ms": _ms(seconds.get(Phase.HANDOFF, 0.0)),
        "decode_ms": _ms(seconds.get(Phase.DECODE, 0.0)),
        "ttft_ms": None if ttft_s is None else _ms(ttft_s),
        "e2e_ms": _ms(now_s - times.submitted_s),
        "cached_tokens": completion.output.num_cached,
        "prefill_worker": route.prefill.id if route else None,
        "decode_worker": route.decode.id if route else None,
        "kv_path": completion.attempt.transport if route else None,
        "route": route.reason if route else "no worker",
    }


def _line(completion: Completion, timing: Timing, error_code: str) -> str:
    is_wanted = completion.state is not State.ABORTED
    how = f" {completion.output.finish_reason or error_code}" if is_wanted else ", as nobody wants it any more"
    num_expected = _num_expected(completion)
    expected = f" of {num_expected} expected" if num_expected else ""
    ttft = "none" if timing["ttft_ms"] is None else f"{timing['ttft_ms']:.0f} ms"
    workers = f"{completion.attempt.route}" if completion.attempt.route else "no worker"
    asked = f", asked as {completion.spec.client_request_id!r}" if completion.spec.client_request_id else ""
    return (
        f"{completion.state.value}{how}: {len(completion.spec.prompt_ids)} prompt tokens, "
        f"{completion.output.num_cached}{expected} cached, "
        f"{len(completion.output.token_ids)} output tokens, {timing['attempts']} attempts, ttft {ttft}, "
        f"e2e {timing['e2e_ms']:.0f} ms: queued {timing['queued_ms']:.0f}, prefill {timing['prefill_ms']:.0f}, "
        f"handoff {timing['handoff_ms']:.0f}, decode {timing['decode_ms']:.0f}, {workers}{asked}"
    )


def _num_expected(completion: Completion) -> int:
    return completion.attempt.route.cost.num_expected if completion.attempt.route else 0


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


PERIOD_S = 30.0
NUM_PERIODS = 10
NUM_SLOWEST = 8


class _Ended(NamedTuple):
    took_s: float
    number: int  # breaks ties
    summary: JsonObject


class Slowest:
    """The slowest completions of the last five minutes, kept by period."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._periods: deque[tuple[float, list[_Ended]]] = deque(maxlen=NUM_PERIODS)
        self._number = 0

    def add(self, completion: Completion, now_s: float) -> None:
        """Record an ended completion, if among the slowest of the period."""
        if not self._periods or now_s - self._periods[-1][0] >= PERIOD_S:
            self._periods.append((now_s, []))
        heap = self._periods[-1][1]
        took_s = now_s - completion.times.submitted_s
        if len(heap) == NUM_SLOWEST and took_s <= heap[0].took_s:
            return
        self._number += 1
        ended = _Ended(took_s, self._number, summary_of(completion, now_s) | {"ended_s": round(self._wall_clock(), 1)})
        if len(heap) < NUM_SLOWEST:
            heappush(heap, ended)
        else:
            heapreplace(heap, ended)

    def report(self, now_s: float) -> list[JsonObject]:
        """Return the slowest completions, longest first."""
        since_s = now_s - NUM_PERIODS * PERIOD_S
        recent = [ended for begun_s, heap in self._periods if begun_s >= since_s for ended in heap]
        return [ended.summary for ended in nlargest(NUM_SLOWEST, recent)]


def summary_of(completion: Completion, now_s: float) -> JsonObject:
    """Return sizes, times and workers of a completion, running or ended."""
    timing, phase = completion.timing or timing_of(completion, now_s), completion.times.phases.current
    return {
        "id": completion.spec.request_id,
        "phase": phase.value if phase else None,
        "outcome": completion.output.finish_reason or (completion.state.value if completion.is_terminal else None),
        "prompt_tokens": len(completion.spec.prompt_ids),
        "output_tokens": len(completion.output.token_ids),
        "most_tokens": completion.spec.sampling.max_tokens,
        "attempts": timing["attempts"],
        "queued_ms": timing["queued_ms"],
        "prefill_ms": timing["prefill_ms"],
        "handoff_ms": timing["handoff_ms"],
        "decode_ms": timing["decode_ms"],
        "ttft_ms": timing["ttft_ms"],
        "e2e_ms": timing["e2e_ms"],
        "cached_tokens": timing["cached_tokens"],
        "prefill_worker": timing["prefill_worker"],
        "decode_worker": timing["decode_worker"],
    }
