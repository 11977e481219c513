"""What a process does once: it asks for open files as it starts, and settles when serving begins."""

import ctypes
import gc
import resource
import sys

from common.base.malloc import trim_memory

PR_SET_TIMERSLACK = 29  # of prctl(2)
TIMER_SLACK_NS = 1000
MOST_FILES = 1 << 20


def raise_open_files() -> int:
    """Allow this process as many file descriptors as the system lets it have; returns how many that are.

    Every connection, worker and file takes one.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (MOST_FILES if limit == resource.RLIM_INFINITY else limit for limit in limits)
    most = max(soft, min(hard, MOST_FILES))
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    return most


def keep_imports() -> None:
    """No collection walks what imports made: that of `settle_memory` would take 50 ms, with requests waiting."""
    gc.freeze()


def settle_memory() -> None:
    """Keep what start-up made, and give what it freed back to the system.

    Collections no longer walk the objects made so far, which would hold up every stream.
    """
    gc.collect()
    gc.freeze()
    trim_memory()


def sharpen_sleeps() -> None:
    """Have sleeps of the calling thread end in time: Linux may end them 50 µs late, so as to wake up less often."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(TIMER_SLACK_NS), 0, 0, 0)
