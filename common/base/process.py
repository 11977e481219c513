"""The own process: its beginning and end, memory kept and allowed, garbage collection, open files, sleeps."""

import ctypes
import gc
import logging
import os
import resource
import sys
import threading
import time
from pathlib import Path

logger = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of mallopt(3)
KEPT_BYTES, MAPPED_BYTES = 4 << 20, 1 << 20
MAX_ARENAS = 4
PR_SET_TIMERSLACK = 29  # of prctl(2)
TIMER_SLACK_NS = 1000
MOST_FILES = 1 << 20
NEW_OBJECTS, LOOKS_AT_NEW = 3500, 200
TURN_S = 0.0005
START_TIME = 19
"""Place of the start time among the fields of /proc/PID/stat behind the name."""


def process_began_s() -> float:
    """Return when the process was forked, by `time.monotonic`, to 10 ms; outside Linux return the present."""
    now_s = time.monotonic()
    if sys.platform != "linux":
        return now_s
    after_name = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    forked_s = int(after_name[START_TIME]) / os.sysconf("SC_CLK_TCK")  # since the host's boot
    return now_s - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - forked_s)


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


def freeze_imports() -> None:
    """Exempt imported objects from collections, because `freeze_and_trim` would spend 50 ms on them."""
    gc.freeze()


def freeze_and_trim() -> None:
    """Exempt start-up objects from collections, and return freed memory to the system; call before serving.

    Otherwise, later collections would walk the start-up objects and hold up every stream.
    """
    gc.collect()
    gc.freeze()
    trim_memory()


def collect_rarely() -> None:
    """Look for cycles once in each new object, and in old objects after 700,000 new ones; for loops that must not wait.

    A look at the new objects takes a millisecond, and tens of them at the objects of hundreds of requests. Requests
    leave few cycles, which take some megabytes until then.
    """
    gc.set_threshold(NEW_OBJECTS, LOOKS_AT_NEW, 0)


def share_interpreter() -> None:
    """Let threads take turns after half a millisecond instead of five.

    A thread that comes back from a library waits for its turn while another runs, and so does the event loop.
    """
    sys.setswitchinterval(TURN_S)


def memory_in_use() -> int:
    """Count the bytes that the process has mapped, by the kernel's measure for `limit_memory`."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (num_kib,) = [int(line.split()[1]) for line in lines if line.startswith("VmData:")]
    return num_kib * 1024


def limit_memory(num_bytes: int, in_use: int | None = None) -> None:
    """Let the process map `num_bytes` more than now, and dump no core; for work on a client's input.

    Args:
        in_use: result of `memory_in_use`, if known.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        in_use = memory_in_use() if in_use is None else in_use
        resource.setrlimit(resource.RLIMIT_DATA, (in_use + num_bytes,) * 2)


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


def ended(status: int, deadline_s: float) -> int:
    """Return a status to exit with once all threads have ended; end the process with it at the deadline.

    A thread that hangs in a library would keep the process for ever, since Python waits for each but daemons.
    """
    end_s = time.monotonic() + deadline_s
    others = [each for each in threading.enumerate() if each is not threading.main_thread() and not each.daemon]
    for thread in others:
        thread.join(max(0.0, end_s - time.monotonic()))
    if hanging := [thread.name for thread in others if thread.is_alive()]:
        logger.error("ending without threads that hang: %s", ", ".join(hanging))
        logging.shutdown()
        os._exit(status)
    return status


def sharpen_sleeps() -> None:
    """End sleeps of the calling thread in time; by default Linux may end sleeps 50 µs late, to wake less often."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(TIMER_SLACK_NS), 0, 0, 0)
