"""Limits on freed memory kept by the C library's allocator."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of mallopt(3)
KEPT_BYTES, MAPPED_BYTES = 4 << 20, 1 << 20
MAX_ARENAS = 4


def tame_allocator() -> None:
    """Bound the freed memory kept by glibc, and keep some; call before starting threads.

    By default, glibc maps each allocation from 128 KiB on anew, with a page fault for each page. After the first free
    of a larger allocation, glibc keeps up to 64 MB. Threads get up to eight arenas for each processor.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_ARENA_MAX, MAX_ARENAS)


def trim_memory() -> None:
    """Return freed memory kept by the C library's allocator to the system.

    glibc needs the call; other allocators trim by themselves.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
