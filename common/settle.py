"""What a process does once, when start-up is over and serving begins."""

import ctypes
import gc


def settle_memory() -> None:
    """Keep what start-up made, and give what it freed back to the system.

    Collections no longer walk the objects made so far, which would hold up every stream. Memory that compiling
    freed would stay with the C library's allocator; glibc returns it when told to, others do so by themselves.
    """
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
