"""Gates of memory servers: whether NIXL is here, and how to reach one."""

import secrets
import time
from pathlib import Path

from common.memory.base.nixl_agent import AgentError, bindings
from common.memory.client.client import MemoryClient
from common.memory.client.gate_connection import Gate
from common.settings.config import NetSection

SECRET = "secret"


def has_nixl() -> bool:
    """Tell whether NIXL can be imported."""
    try:
        bindings()
    except AgentError:
        return False
    return True


def secret_file(directory: Path) -> Path:
    """Return a file with a secret, the same for all in a directory."""
    path = directory / SECRET
    if not path.exists():
        path.touch(0o600)
        path.write_text(secrets.token_hex(32))
    return path


def gate_flags(directory: Path, address: str = "127.0.0.1") -> list[str]:
    """Return flags of a memory server with a gate."""
    return ["--net-advertise", address, "--net-secret-file", str(secret_file(directory))]


def gate_of(socket: Path, directory: Path, net: NetSection | None = None) -> Gate:
    """Return the gate of the memory server at a socket, which has started."""
    client = MemoryClient(socket, f"asker-{time.monotonic_ns()}", 1, is_decoding=False)
    try:
        return Gate(client.gate, net or NetSection(secret_file=str(secret_file(directory))))
    finally:
        client.close()
