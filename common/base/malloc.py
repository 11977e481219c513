"""What the C library's allocator keeps of memory that was freed."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of mallopt(3)
KEPT_BYTES, MAPPED_BYTES = 4 << 20, 1 << 20
MAX_ARENAS = 4


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
