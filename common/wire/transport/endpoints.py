"""Endpoints of sockets: unix sockets in a user's private directory, or TCP between processes with a shared secret."""

import contextlib
import os
import socket
import stat
import struct
import time
from hashlib import sha256
from pathlib import Path

from common.base.errors import ConfigError

AUTO = "auto"
ROUTER_SOCKET, FRONT_SOCKET = "router", "front"
PARENT = Path("/tmp")
NEW_S = 60.0
_CREDENTIALS = struct.Struct("3i")
DIGITS = 12
"""Hex digits of the router endpoint's hash in a memory server's name."""


def resolved(endpoint: str, name: str) -> str:
    """Return `endpoint`, or for auto the socket `name` in the private directory; raises ConfigError."""
    return f"ipc://{private_directory() / name}.sock" if endpoint == AUTO else endpoint


def unbound(advertise: str) -> str:
    """Return an endpoint to bind on all addresses of this host, at a free port."""
    return "tcp://[::]:*" if ":" in advertise else "tcp://0.0.0.0:*"


def told(endpoint: str, advertise: str) -> str:
    """Return a bound endpoint for other hosts: `advertise` stands for all addresses of this host."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not advertise or host not in ("*", "0.0.0.0", "[::]"):
        return endpoint
    return f"tcp://[{advertise}]:{port}" if ":" in advertise else f"tcp://{advertise}:{port}"


def memory_socket(choice: str, device_uuid: str, router_endpoint: str) -> Path:
    """Return the socket path of a device's memory server; raises ConfigError.

    Args:
        choice: a path, a directory (with a slash at the end), or auto.
        device_uuid: the GPU's, because processes may number GPUs differently; "" on a CPU.
        router_endpoint: the workers' router. A memory server reports deaths to a single router, so workers of a second
            router need a second server.
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
    """Return the directory of memory servers' sockets for all devices; None when `choice` is a single path."""
    if choice == AUTO:
        return private_directory()
    return Path(choice) if choice.endswith("/") else None


def absolute(endpoint: str) -> str:
    """Return an endpoint valid in any working directory."""
    path = socket_path(endpoint)
    return endpoint if path is None else f"ipc://{path.absolute()}"


def private_directory() -> Path:
    """Make and return the directory shared by the user's processes and closed to other users; raises ConfigError."""
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
    """Raise ConfigError for an endpoint that another user could reach or serve."""
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
    """Say why users other than the caller and root may put a file into a directory; "" if none may.

    Permission to replace a parent directory counts, too. Parents with a sticky bit, such as /tmp, are safe.
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
    """Raise ConfigError when another process serves the unix socket, because binding would silently take the path over.

    Also removes abandoned sockets from the private directory.
    """
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
    """Remove the file of a bound unix socket; call before closing, because a new owner may bind the path afterwards."""
    path = socket_path(endpoint)
    if path is not None:
        path.unlink(missing_ok=True)


def socket_path(endpoint: str) -> Path | None:
    """Return the file of an `ipc://` endpoint; None for TCP and abstract sockets."""
    scheme, _, where = endpoint.partition("://")
    return Path(where) if scheme == "ipc" and not where.startswith("@") else None


def is_served(path: Path) -> bool:
    """Tell whether a process listens on a unix socket; a killed process leaves the socket's file behind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:  # such as a full queue: a process listens
            return True
    return True


def peer_of(connection: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group ids of the process at the other end of a unix socket."""
    process, user, group = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return process, user, group


def _remove_abandoned(directory: Path) -> None:
    """Remove sockets without a listener, except new sockets: their owners may be about to listen."""
    for path in directory.glob("*.sock"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > NEW_S and not is_served(path):
                path.unlink()
