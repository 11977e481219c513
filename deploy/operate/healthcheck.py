"""Probe of health, and the wait until a router serves.

As a program, exit status 0 if the router serves or knows a worker, or memory servers answer.

    python -m deploy.operate.healthcheck http://router:8000 [WORKER ...]
    python -m deploy.operate.healthcheck /run/memory.sock
    python -m deploy.operate.healthcheck /run/memory/

WORKER lacks this container's host name, as `prefill`. Imports the standard library only, because the probe runs
every few seconds.
"""

import http.client
import json
import re
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from common.base.json_file import JsonObject

DEADLINE_S = 5.0
MAX_BYTES = 16 << 20
"""Limit of an answer, several times the largest answer of a router."""
OTHERS_ANSWER = "what answers there is no router of this version"
SERVING = ("ok", "degraded")
"""States in which a router answers completions."""
ASK_INTERVAL_S = 0.3
SETTLING_S = 5.0
"""Seconds to wait for further workers once a first decode worker serves."""
NOT_OURS = (KeyError, TypeError, AttributeError)
"""Errors raised by reading another program's answer."""


def fetch(url: str) -> JsonObject:
    """Return the body of GET /health, also with status 503; raises OSError or ValueError within DEADLINE_S.

    A thread asks, because name lookup and endless answers have no deadline of their own.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or re.search(r"[^!-~]", url):
        raise ValueError("a URL is like http://127.0.0.1:8000")
    answers: list[JsonObject | Exception] = []
    asking = threading.Thread(target=lambda: answers.append(_answer(f"{url}/health")), daemon=True)
    asking.start()
    asking.join(DEADLINE_S)
    if not answers:
        raise TimeoutError(f"no whole answer within {DEADLINE_S:g} s")
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def _answer(url: str) -> JsonObject | Exception:
    """Get and parse a body; ignores proxies of the environment, because proxies do not know local containers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        try:
            with opener.open(url, timeout=DEADLINE_S) as response:
                text = response.read(MAX_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            return ValueError(f"the answer has more than {MAX_BYTES:,} bytes")
        body: JsonObject = json.loads(text)
        return body
    except OSError as error:
        return error
    except (ValueError, RecursionError, http.client.HTTPException) as error:
        return ValueError(f"{OTHERS_ANSWER} ({error!s:.200})")


def worker_here(name: str) -> str:
    """Return the name of a container's worker; a container has a host name of its own."""
    return f"{name}-{socket.gethostname()}"


def problem(body: JsonObject, worker_ids: Sequence[str]) -> str:
    """Return the problem, or an empty string."""
    if not worker_ids:
        return "" if body["status"] in SERVING else f"{body['status']}: {'; '.join(body['problems'])}"
    known = {worker["id"] for workers in body["workers"].values() for worker in workers}
    missing = [each for each in worker_ids if each not in known]
    return f"the router does not know {', '.join(missing)}" if missing else ""


def await_turn(path: str) -> None:
    """Connect to a memory server and send nothing; a live loop closes the connection. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(DEADLINE_S)
        connection.connect(path)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


def await_turns(directory: Path) -> None:
    """Call `await_turn` for all memory servers with sockets in `directory`, at least one. Raises OSError."""
    paths = list(directory.glob("*.sock"))
    if not paths:
        raise FileNotFoundError(f"no memory server's socket is in {directory}")
    for path in paths:
        await_turn(str(path))


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


def main(argv: list[str]) -> int:
    where, worker_ids = argv[0], [worker_here(each) for each in argv[1:]]
    found = ""
    try:
        if where.endswith("/") and where.startswith("/"):
            await_turns(Path(where))
        elif where.startswith("/"):
            await_turn(where)
        else:
            found = problem(fetch(where), worker_ids)
    except (OSError, ValueError) as error:
        found = str(error)
    except NOT_OURS:
        found = OTHERS_ANSWER
    print(found or "ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
