"""CUDA IPC handles of memory as bytes, to send to another process.

Handles are read and written by address, because `cuda.bindings` names their bytes differently from version to version.
"""

import ctypes
from typing import Any

HANDLE_BYTES = 64


def to_bytes(handle: Any) -> bytes:
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def from_bytes(data: bytes) -> Any:
    """Return a `cudaIpcMemHandle_t`; raises ValueError unless `data` has `HANDLE_BYTES`."""
    from cuda.bindings import runtime

    if len(data) != HANDLE_BYTES:
        raise ValueError(f"a CUDA IPC handle of {len(data)} bytes, not {HANDLE_BYTES}")
    handle = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(handle.getPtr(), data, HANDLE_BYTES)
    return handle
