"""Wait for a router to answer completions."""

import time

from deploy.operate.healthcheck import NOT_OURS, OTHERS_ANSWER, SERVING, fetch

ASK_INTERVAL_S = 0.3
SETTLING_S = 5.0
"""Seconds to wait for further workers once a first decode worker serves."""


def wait_until_ready(url: str, timeout_s: float) -> str:
    """Return an empty string once requests are answered, or the last problem after `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    answered_since_s = 0.0
    while True:
        status, problem = _state(url)
        now_s = time.monotonic()
        answered_since_s = (answered_since_s or now_s) if status in SERVING else 0.0
        if status == "ok" or (answered_since_s and now_s - answered_since_s >= SETTLING_S):
            return ""
        if now_s >= until_s:
            return "" if answered_since_s else problem
        time.sleep(ASK_INTERVAL_S)


def _state(url: str) -> tuple[str, str]:
    """Ask once; return the status, "" without an answer, and the problem."""
    try:
        health = fetch(url)
        return str(health["status"]), f"{health['status']}: {'; '.join(health['problems'])}"
    except (OSError, ValueError) as error:
        return "", f"no router answers at {url}: {error}"
    except NOT_OURS:
        return "", f"no router answers at {url}: {OTHERS_ANSWER}"
