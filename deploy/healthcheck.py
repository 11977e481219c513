"""A container's health probe: exit code 0 when the router can serve or knows a worker, or memory servers answer.

    python -m deploy.healthcheck http://router:8000 [WORKER_ID]
    python -m deploy.healthcheck /run/memory.sock
    python -m deploy.healthcheck /run/memory/

Imports the standard library only, since it runs every few seconds.
"""

import json
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

DEADLINE_S = 5.0


def fetch(url: str) -> dict[str, Any]:
    """The body of GET /health, which comes with status 503 too; raises OSError or ValueError."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=DEADLINE_S) as response:
            body: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            body = json.load(error)
    return body


def problem(body: dict[str, Any], worker_id: str) -> str:
    """What is wrong, or an empty string."""
    if not worker_id:
        return "" if body["status"] == "ok" else f"{body['status']}: {'; '.join(body['missing'])}"
    known = {worker["id"] for workers in body["workers"].values() for worker in workers}
    return "" if worker_id in known else f"the router does not know {worker_id}"


def await_turn(path: str) -> None:
    """Say nothing to a memory server and leave: a loop that turns closes the connection. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(DEADLINE_S)
        connection.connect(path)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


def await_turns(directory: Path) -> None:
    """The same of all memory servers whose sockets are there, of which there is one at least. Raises OSError."""
    paths = list(directory.glob("*.sock"))
    if not paths:
        raise FileNotFoundError(f"no memory server's socket is in {directory}")
    for path in paths:
        await_turn(str(path))


def main(argv: list[str]) -> int:
    where, worker_id = argv[0], argv[1] if len(argv) > 1 else ""
    found = ""
    try:
        if where.endswith("/") and where.startswith("/"):
            await_turns(Path(where))
        elif where.startswith("/"):
            await_turn(where)
        else:
            found = problem(fetch(where), worker_id)
    except (OSError, ValueError) as error:
        found = str(error)
    print(found or "ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
