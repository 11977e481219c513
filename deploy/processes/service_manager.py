"""Tells the service manager that started this process that it serves, where there is one (systemd's sd_notify)."""

import contextlib
import os
import socket
from collections.abc import Mapping


def notify_ready(environ: Mapping[str, str] = os.environ) -> None:
    """Send READY=1 where `NOTIFY_SOCKET` says; do nothing where it says nothing, or nobody is there."""
    path = environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    address = f"\0{path[1:]}" if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, contextlib.suppress(OSError):
        manager.sendto(b"READY=1", address)
