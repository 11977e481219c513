"""Notification of the service manager, if any, that the system serves (systemd's sd_notify)."""

import contextlib
import os
import socket
from collections.abc import Mapping


def notify_ready(environ: Mapping[str, str] = os.environ) -> None:
    """Send READY=1 to `NOTIFY_SOCKET`; do nothing without the variable or a listener."""
    path = environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    address = f"\0{path[1:]}" if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, contextlib.suppress(OSError):
        manager.sendto(b"READY=1", address)
