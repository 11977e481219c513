"""Who may ask: clients that show a key out of a file, if there is one.

Keys are kept as digests, and none is ever logged or told. What was shown is compared with all of them, each in constant
time, so that the time to refuse it says nothing about any. When the file changes it is read again, so that keys come
and go while the server runs.
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
    """The keys of a file; none without a file, and then everybody may ask."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError, with the line, for a file that cannot be read or holds what is no key."""
        self._path = Path(path) if path else None
        self._looked_s = time.monotonic()
        self._version = None if self._path is None else _version(self._path)
        self._digests = [] if self._path is None else _read(self._path)

    def owner(self, request: web.BaseRequest) -> str:
        """A name for the client whose key `request` shows, the same for each of its requests, "" when none is needed.

        Raises RequestError (401).
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
        """If the file has changed, looked at now and then; one that holds no keys changes nothing."""
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
"""Of the key that a request showed; "" when none is needed."""


def guarded(*open_to_all: Handler) -> Middleware:
    """A middleware that lets in who shows a key, wherever it goes, but to handlers that are `open_to_all`."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.handler not in open_to_all:
            request[OWNER] = request.app[API_KEYS].owner(request)
        return await handler(request)

    return guard


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _version(path: Path) -> tuple[int, ...] | None:
    """What differs once a file is written or replaced; None for one that is not there, or is a pipe and read once."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return None if not stat.S_ISREG(found.st_mode) else (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _read(path: Path) -> list[bytes]:
    """Digests of keys, one a line; empty lines and lines that begin with # do not count."""
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
