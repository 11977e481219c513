"""Notes in a user's private directory: each maps a router's HTTP port to the router's endpoint and secret file."""

import json
import os
from contextlib import suppress
from pathlib import Path

from common.base.errors import ConfigError
from common.base.json_file import JsonObject
from common.settings.config import NetSection
from common.wire.transport.endpoints import absolute, private_directory


def note(port: int, endpoint: str, net: NetSection) -> None:
    """Write the note of this router, the port's owner from now on; raises ConfigError and OSError."""
    secret_file = os.path.abspath(net.secret_file) if net.secret_file else ""
    text = json.dumps({"router_endpoint": absolute(endpoint), "secret_file": secret_file, "pid": os.getpid()})
    temporary = _path(port).with_suffix(f".{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(_path(port))
    _remove_abandoned()


def forget(port: int) -> None:
    """Remove this router's note; the note of a successor on the port stays."""
    with suppress(ConfigError, OSError):
        if _read(port).get("pid") == os.getpid():
            _path(port).unlink(missing_ok=True)


def found(port: int) -> NetSection | None:
    """Return the settings to dial the router; None without a note."""
    noted = _read(port)
    with suppress(KeyError):
        return NetSection(router_endpoint=noted["router_endpoint"], secret_file=noted["secret_file"])
    return None


def _remove_abandoned() -> None:
    """Remove notes of killed routers, whole or half written; a file without a process id stays."""
    for path in private_directory().glob("router-*.*"):
        pid = _noted(path).get("pid") if path.suffix == ".json" else path.suffix.removeprefix(".")
        with suppress(OSError):
            if str(pid).isdecimal() and not Path(f"/proc/{pid}").exists():
                path.unlink()


def _read(port: int) -> JsonObject:
    return _noted(_path(port))


def _noted(path: Path) -> JsonObject:
    try:
        noted = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}


def _path(port: int) -> Path:
    return private_directory() / f"router-{port}.json"
