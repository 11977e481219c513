"""Summary of an ended completion: written to the log, and sent to clients on request."""

import logging

from router.base.shapes import ChoiceTiming
from router.dispatch.journey import End
from router.dispatch.phases import Phase
from router.dispatch.request_state import Completion, State

logger = logging.getLogger(__name__)


def tell_end(completion: Completion, now_s: float, error_code: str = "") -> None:
    """Log a completion just after the end, while the route is known: sizes and times, never text."""
    timing = completion.timing = timing_of(completion, now_s)
    told = {
        "request_id": completion.request_id,
        "client_request_id": completion.client_request_id,
        "state": completion.state.value,
        "finish_reason": completion.finish_reason or None,
        "error": error_code or None,
        "prompt_tokens": len(completion.prompt_ids),
        "expected_cached_tokens": _num_expected(completion),
        "output_tokens": len(completion.outputs),
    }
    line = _line(completion, timing, error_code)
    logger.info("[%s] %s", completion.request_id, line, extra={"fields": told | timing})
    if completion.journey is not None:
        completion.journey.end(End(now_s, completion.last_token_s, told | timing))


def timing_of(completion: Completion, now_s: float) -> ChoiceTiming:
    """Tell where the time of a completion went, until now if the completion is running."""
    seconds, route = completion.phases.until(now_s), completion.attempt.route
    ttft_s = completion.first_token_s - completion.submitted_s if completion.first_token_s else None
    return {
        "index": completion.index,
        "attempts": completion.attempt.number + 1,
        "read_ms": _ms(completion.submitted_s - completion.received_s) if completion.received_s else 0.0,
        "queued_ms": _ms(seconds.get(Phase.QUEUED, 0.0)),
        "prefill_ms": _ms(seconds.get(Phase.PREFILL, 0.0)),
        "handoff_ms": _ms(seconds.get(Phase.HANDOFF, 0.0)),
        "decode_ms": _ms(seconds.get(Phase.DECODE, 0.0)),
        "ttft_ms": None if ttft_s is None else _ms(ttft_s),
        "e2e_ms": _ms(now_s - completion.submitted_s),
        "cached_tokens": completion.num_cached,
        "prefill_worker": route.prefill.id if route else None,
        "decode_worker": route.decode.id if route else None,
        "kv_path": completion.attempt.transport if route else None,
        "route": route.reason if route else "no worker",
    }


def _line(completion: Completion, timing: ChoiceTiming, error_code: str) -> str:
    is_wanted = completion.state is not State.ABORTED
    how = f" {completion.finish_reason or error_code}" if is_wanted else ", as nobody wants it any more"
    num_expected = _num_expected(completion)
    expected = f" of {num_expected} expected" if num_expected else ""
    ttft = "none" if timing["ttft_ms"] is None else f"{timing['ttft_ms']:.0f} ms"
    workers = f"{completion.attempt.route}" if completion.attempt.route else "no worker"
    asked = f", asked as {completion.client_request_id!r}" if completion.client_request_id else ""
    return (
        f"{completion.state.value}{how}: {len(completion.prompt_ids)} prompt tokens, "
        f"{completion.num_cached}{expected} cached, "
        f"{len(completion.outputs)} output tokens, {timing['attempts']} attempts, ttft {ttft}, "
        f"e2e {timing['e2e_ms']:.0f} ms: queued {timing['queued_ms']:.0f}, prefill {timing['prefill_ms']:.0f}, "
        f"handoff {timing['handoff_ms']:.0f}, decode {timing['decode_ms']:.0f}, {workers}{asked}"
    )


def _num_expected(completion: Completion) -> int:
    return completion.attempt.route.cost.num_expected if completion.attempt.route else 0


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
