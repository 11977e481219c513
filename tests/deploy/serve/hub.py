"""A server that answers as the Hugging Face Hub does, with one model, for tests of downloads."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HUB_ID = "owner/tiny"
COMMIT = "5d1f" * 10


class Hub(ThreadingHTTPServer):
    """Serves `files`, by name, and notes what it was asked for.

    Args:
        refusal: status and X-Error-Code with which files are refused.
        listing: the same, with which what there is is refused.
        is_silent: take connections and never answer.
        breaks: names of files that end in their middle.
        holds: names of files that stand still in their middle.
        claimed_bytes: size that each file is said to have in the listing; None its own.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.refusal: tuple[int, str] | None = None
        self.listing: tuple[int, str] | None = None
        self.is_silent = False
        self.breaks: set[str] = set()
        self.holds: set[str] = set()
        self.is_held = threading.Event()
        self.claimed_bytes: int | None = None
        self.sent: list[str] = []
        self.over = threading.Event()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def end(self) -> None:
        """No longer listen."""
        self.over.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.server.is_silent:
            self.server.over.wait(60)
            self.close_connection = True
            return
        path = self.path.partition("?")[0]
        if found := re.fullmatch(rf"/{HUB_ID}/resolve/{COMMIT}/(.+)", path):
            self._send_file(found[1])
        elif self.server.listing:
            self._refuse(*self.server.listing)
        elif path in (f"/api/models/{HUB_ID}", f"/api/models/{HUB_ID}/revision/main"):
            siblings = [
                {"rfilename": each["path"], "blobId": each["oid"], "size": each["size"]} for each in self._tree()
            ]
            self._send_json({"id": HUB_ID, "sha": COMMIT, "tags": [], "downloads": 0, "siblings": siblings})
        elif path == f"/api/models/{HUB_ID}/tree/{COMMIT}":
            self._send_json(self._tree())
        else:
            self._refuse(401, "RepoNotFound")

    def _tree(self) -> list[dict[str, Any]]:
        claimed = self.server.claimed_bytes
        return [
            {"type": "file", "path": name, "oid": _etag(data), "size": len(data) if claimed is None else claimed}
            for name, data in self.server.files.items()
        ]

    def _send_file(self, name: str) -> None:
        if self.server.refusal:
            self._refuse(*self.server.refusal)
            return
        data = self.server.files[name]
        begin = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        part = data[int(begin[1]) if begin else 0 :]
        self.send_response(206 if begin else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if self.command == "GET":
            self.server.sent.append(name)
            self.close_connection = name in self.server.breaks | self.server.holds
            self.wfile.write(part[: len(part) // 2] if self.close_connection else part)
            if name in self.server.holds:
                self.server.is_held.set()
                self.server.over.wait(60)

    def _send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
