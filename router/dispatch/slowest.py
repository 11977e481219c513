"""Keeps the completions that took longest lately, for whoever looks: bounded, and without a word of any prompt."""

import time
from collections import deque
from collections.abc import Callable
from heapq import heappush, heapreplace, nlargest
from typing import NamedTuple

from common.base.json_file import JsonObject
from router.dispatch.completion_summary import timing_of
from router.dispatch.request_state import Completion

PERIOD_S = 30.0
NUM_PERIODS = 10
NUM_TOLD = 8


class _Ended(NamedTuple):
    took_s: float
    number: int  # breaks ties
    told: JsonObject


class Slowest:
    """Looks back over five minutes: of each of their periods the slowest are kept."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._periods: deque[tuple[float, list[_Ended]]] = deque(maxlen=NUM_PERIODS)
        self._number = 0

    def note(self, completion: Completion, now_s: float) -> None:
        """A completion has ended."""
        if not self._periods or now_s - self._periods[-1][0] >= PERIOD_S:
            self._periods.append((now_s, []))
        heap = self._periods[-1][1]
        took_s = now_s - completion.submitted_s
        if len(heap) == NUM_TOLD and took_s <= heap[0].took_s:
            return
        self._number += 1
        ended = _Ended(took_s, self._number, told_of(completion, now_s) | {"ended_s": round(self._wall_clock(), 1)})
        if len(heap) < NUM_TOLD:
            heappush(heap, ended)
        else:
            heapreplace(heap, ended)

    def report(self, now_s: float) -> list[JsonObject]:
        """Return the slowest, longest first."""
        since_s = now_s - NUM_PERIODS * PERIOD_S
        recent = [ended for begun_s, heap in self._periods if begun_s >= since_s for ended in heap]
        return [ended.told for ended in nlargest(NUM_TOLD, recent)]


def told_of(completion: Completion, now_s: float) -> JsonObject:
    """Tell sizes, times and workers of a completion, over or under way."""
    timing, phase = completion.timing or timing_of(completion, now_s), completion.phases.current
    return {
        "id": completion.request_id,
        "phase": phase.value if phase else None,
        "outcome": completion.finish_reason or (completion.state.value if completion.is_terminal else None),
        "prompt_tokens": len(completion.prompt_ids),
        "output_tokens": len(completion.outputs),
        "most_tokens": completion.sampling.max_tokens,
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
