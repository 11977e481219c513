"""One-time actions of a process: raise the open-file limit at start, and settle memory when serving begins."""

import ctypes
import gc
import resource
import sys

from common.base.malloc import trim_memory

PR_SET_TIMERSLACK = 29  # of prctl(2)
TIMER_SLACK_NS = 1000
MOST_FILES = 1 << 20


def raise_open_files() -> int:
    """Raise the process's file-descriptor limit to the system's maximum; return the limit.

    Every connection, worker and file takes a descriptor.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (MOST_FILES if limit == resource.RLIM_INFINITY else limit for limit in limits)
    most = max(soft, min(hard, MOST_FILES))
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    return most


def keep_imports() -> None:
    """Exempt imported objects from collections, because `settle_memory` would spend 50 ms on them."""
    gc.freeze()


def settle_memory() -> None:
    """Exempt start-up objects from collections, and return freed memory to the system.

    Otherwise, later collections would walk the start-up objects and hold up every stream.
    """
    gc.collect()
    gc.freeze()
    trim_memory()


def sharpen_sleeps() -> None:
    """End sleeps of the calling thread in time; by default Linux may end sleeps 50 µs late, to wake less often."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(TIMER_SLACK_NS), 0, 0, 0)
