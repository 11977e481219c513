"""API keys: with a key file, every client must show a key.

Keys are kept as digests, and never logged or told. A shown key is compared with all digests, each in constant time, so
the time of a refusal reveals nothing. A changed file is read again, so keys come and go while the server runs.
"""

import hashlib
import hmac
import logging
import os
import re
import stat
import time
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from common.base.errors import ConfigError, RequestError
from common.base.plain_file import read_plain

logger = logging.getLogger(__name__)

MAX_KEYS = 1000
MAX_FILE_BYTES = 1 << 20
LOOK_S = 1.0
KEY = re.compile(r"[!-~]{16,256}")
BEARER = re.compile(r"\s*bearer\s+(\S+)\s*", re.IGNORECASE)


class ApiKeys:
    """The keys of a file; without a file, every client is admitted."""

    def __init__(self, path: str) -> None:
        """Read the keys; raise ConfigError, with the line, for an unreadable file or an invalid key."""
        self._path = Path(path) if path else None
        self._looked_s = time.monotonic()
        self._version = None if self._path is None else _version(self._path)
        self._digests = [] if self._path is None else _read(self._path)

    def owner(self, request: web.BaseRequest) -> str:
        """Return a stable name for the key shown by `request`; empty if no key is needed.

        Raises RequestError (401) without a known key.
        """
        if self._path is None:
            return ""
        self._read_again(self._path)
        bearer = BEARER.fullmatch(request.headers.get("Authorization", ""))
        shown = [bearer[1] if bearer else "", request.headers.get("X-Api-Key", "").strip()]
        digests = [_digest(key) for key in shown if key]
        owners = [known for known in self._digests for digest in digests if hmac.compare_digest(known, digest)]
        if not owners:
            wrong = "no such API key" if digests else "an API key is needed"
            message = f"{wrong}: send `Authorization: Bearer KEY` or `X-Api-Key: KEY` with one of the server's keys"
            raise RequestError(message, code="invalid_api_key", status=401)
        return f"key {owners[0].hex()}"

    def _read_again(self, path: Path) -> None:
        """Read the file again after a change, looking every `LOOK_S`; an invalid file changes nothing."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        version = _version(path)
        if version == self._version:
            return
        self._version = version
        try:
            self._digests = _read(path)
        except ConfigError as error:
            logger.error("API keys stay as they were: %s", error)
        else:
            logger.info("%s has changed: %d API keys", path, len(self._digests))


API_KEYS = web.AppKey("api_keys", ApiKeys)
OWNER = web.RequestKey("owner", str)
"""Name of the request's key; empty if no key is needed."""


def guarded(*open_to_all: Handler) -> Middleware:
    """Return a middleware requiring a key, except for the handlers `open_to_all`."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.handler not in open_to_all:
            request[OWNER] = request.app[API_KEYS].owner(request)
        return await handler(request)

    return guard


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _version(path: Path) -> tuple[int, ...] | None:
    """Return values changed by writing or replacing the file.

    Returns None for a missing file, and for a pipe, because a pipe can be read only once.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return None if not stat.S_ISREG(found.st_mode) else (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _read(path: Path) -> list[bytes]:
    """Return the digests of keys, a key per line; skip empty lines and lines beginning with #."""
    try:
        lines = read_plain(path, MAX_FILE_BYTES).decode("ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"router.api_key_file: {path}: {getattr(error, 'strerror', None) or 'not ASCII'}") from None
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    keys = [(number, line) for number, line in numbered if line and not line.startswith("#")]
    for number, key in keys:
        if not KEY.fullmatch(key):
            raise ConfigError(
                f"router.api_key_file: {path}, line {number}: a key is 16 to 256 ASCII characters, no spaces; "
                "for example `openssl rand -hex 32`"
            )
    if not 1 <= len(keys) <= MAX_KEYS:
        raise ConfigError(f"router.api_key_file: {path}: {len(keys)} keys; 1 to {MAX_KEYS}, one a line")
    return [_digest(key) for _, key in keys]
