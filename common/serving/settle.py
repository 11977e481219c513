"""What a process does once, when start-up is over and serving begins."""

import ctypes
import gc
import sys

PR_SET_TIMERSLACK = 29  # of prctl(2)
TIMER_SLACK_NS = 1000
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of mallopt(3)
KEPT_BYTES, MAPPED_BYTES = 4 << 20, 1 << 20
MAX_ARENAS = 4


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


def tame_allocator() -> None:
    """Bound what glibc keeps of freed memory, and keep some; call before there are threads.

    By itself it maps what has 128 KiB anew each time, and faults once for each page of it, until something larger was
    freed, and from then on keeps up to 64 MB; and it lets threads have eight arenas for each processor.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_ARENA_MAX, MAX_ARENAS)


def trim_memory() -> None:
    """Give freed memory that the C library's allocator keeps back to the system.

    glibc does so when told to, others by themselves.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def sharpen_sleeps() -> None:
    """Have sleeps of the calling thread end in time: Linux may end them 50 µs late, so as to wake up less often."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(TIMER_SLACK_NS), 0, 0, 0)
