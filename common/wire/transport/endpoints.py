"""Names where sockets meet: unix sockets in a directory of this user's own, or TCP among those who share a secret."""

import contextlib
import os
import socket
import stat
import time
from hashlib import sha256
from pathlib import Path

from common.base.errors import ConfigError

AUTO = "auto"
ROUTER_SOCKET = "router"
PARENT = Path("/tmp")
NEW_S = 60.0
DIGITS = 12
"""Of a router's endpoint, in the name of its workers' memory servers."""


def resolved(endpoint: str, name: str) -> str:
    """`endpoint`, or for auto the socket called `name` in the private directory; raises ConfigError."""
    return f"ipc://{private_directory() / name}.sock" if endpoint == AUTO else endpoint


def memory_socket(choice: str, device_uuid: str, router_endpoint: str) -> Path:
    """Where the memory server of a device is found; `choice` is a path, a directory (with a slash at its end), or auto.

    Raises ConfigError.

    Args:
        device_uuid: of a GPU, by which processes that number GPUs differently mean the same one; "" on a CPU.
        router_endpoint: of its workers. It tells one router of their deaths, so those of another have another server.
    """
    name = f"memory-{device_uuid or 'cpu'}"
    if choice.endswith("/"):
        return Path(choice) / f"{name}.sock"
    if choice != AUTO:
        return Path(choice)
    router, usual = absolute(resolved(router_endpoint, ROUTER_SOCKET)), resolved(AUTO, ROUTER_SOCKET)
    whose = "" if router == usual else f"-{sha256(router.encode()).hexdigest()[:DIGITS]}"
    return private_directory() / f"{name}{whose}.sock"


def shared_directory(choice: str) -> Path | None:
    """Where memory servers of several devices are found, each by its name; None where one path was chosen."""
    if choice == AUTO:
        return private_directory()
    return Path(choice) if choice.endswith("/") else None


def absolute(endpoint: str) -> str:
    """The same endpoint for a process with another working directory."""
    path = socket_path(endpoint)
    return endpoint if path is None else f"ipc://{path.absolute()}"


def private_directory() -> Path:
    """A directory that only this user may enter, the same for all processes of the user; raises ConfigError."""
    path = _private_path()
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(
            f"cannot make {path}: {error.strerror}; set net.router_endpoint, net.handoff_endpoint and "
            "worker.memory_socket to paths elsewhere"
        ) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{path} is not a directory that only user {os.getuid()} may enter (mode 700); remove it, or set "
            "net.router_endpoint and net.handoff_endpoint"
        )
    return path


def _private_path() -> Path:
    return PARENT / f"baton-{os.getuid()}"


def require_protected(endpoint: str, *, has_secret: bool) -> None:
    """Raise ConfigError for an endpoint that strangers could reach, or be found at."""
    scheme, _, where = endpoint.partition("://")
    if scheme not in ("ipc", "tcp") or where in ("", "*"):
        raise ConfigError(f"endpoint {endpoint!r:.80}: tcp://HOST:PORT, ipc://PATH or {AUTO}")
    if has_secret:
        return
    path = socket_path(endpoint)
    if path is None:
        raise ConfigError(
            f"{endpoint} can be reached by any user of this machine, if not by others: set net.secret_file on every "
            f"process (openssl rand -hex 32), or leave the endpoint at {AUTO}"
        )
    if problem := shared_with(path.absolute().parent):
        raise ConfigError(
            f"{endpoint}: {problem}, so that any user there could be found in the place of ours: name a path in a "
            "directory of your own (mkdir -m 700), set net.secret_file on every process (openssl rand -hex 32), or "
            f"leave the endpoint at {AUTO}"
        )


def shared_with(directory: Path) -> str:
    """Why others than this user, and root, may put a file into a directory; "" if they may not.

    Who may replace one of the directories above it may, too; in those with a sticky bit, as /tmp, nobody replaces
    what is another's.
    """
    try:
        real = directory.resolve(strict=True)
        status = real.stat()
        if status.st_uid not in (os.getuid(), 0):
            return f"{real} belongs to user {status.st_uid}"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others may write to {real} (mode {stat.S_IMODE(status.st_mode):o})"
        for above in real.parents:
            mode = above.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                return f"others may replace what is in {above} (mode {stat.S_IMODE(mode):o})"
    except OSError as error:
        return f"{directory}: {error.strerror}"
    return ""


def claim(endpoint: str) -> None:
    """Raise ConfigError when another process serves a unix socket: binding would take it away silently."""
    path = socket_path(endpoint)
    if path is None:
        return
    if is_served(path):
        raise ConfigError(f"{endpoint} is served by another process; stop that, or choose another endpoint")
    if path.parent == _private_path():
        _remove_abandoned(path.parent)


def restrict(endpoint: str) -> None:
    """Let only this user connect to a bound unix socket."""
    path = socket_path(endpoint)
    if path is not None:
        path.chmod(0o600)


def release(endpoint: str) -> None:
    """Remove the file of a bound unix socket; call before it is closed, as from then on it may be another's."""
    path = socket_path(endpoint)
    if path is not None:
        path.unlink(missing_ok=True)


def socket_path(endpoint: str) -> Path | None:
    """The file of an `ipc://` endpoint that has one by name."""
    scheme, _, where = endpoint.partition("://")
    return Path(where) if scheme == "ipc" and not where.startswith("@") else None


def is_served(path: Path) -> bool:
    """Whether somebody listens on a unix socket; its file outlives a process that was killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:  # a full queue, perhaps: somebody is there
            return True
    return True


def _remove_abandoned(directory: Path) -> None:
    """Remove sockets on which nobody listens any more, but none so new that its owner may be about to."""
    for path in directory.glob("*.sock"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > NEW_S and not is_served(path):
                path.unlink()
