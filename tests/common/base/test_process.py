"""After start-up: collections walk nothing made so far, freed memory is the system's again, sleeps are exact."""

import ctypes
import gc
import subprocess
import sys
from pathlib import Path

import pytest

from common.base.process import MAX_ARENAS, TIMER_SLACK_NS

ROOT = Path(__file__).parents[3]
SCRIPT = """
import gc
from pathlib import Path
from common.base.process import freeze_and_trim

def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

kept = bytearray(1000)
freed = [bytes(2000) for _ in range(100_000)]  # small pieces, which the allocator keeps when they are freed
last = bytes(2000)  # lies behind them, so that the heap cannot simply shrink
del freed
before = resident_mb()
freeze_and_trim()
print(before - resident_mb(), gc.get_freeze_count())
"""


ARENAS = """
import ctypes, threading
from common.base.process import tame_allocator

def allocate():
    libc.malloc(1000)
    all_have.wait()

libc = ctypes.CDLL(None)
tame_allocator()
all_have = threading.Barrier(16)
threads = [threading.Thread(target=allocate) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.malloc_stats()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_threads_have_few_arenas() -> None:
    ran = subprocess.run([sys.executable, "-c", ARENAS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 1 < ran.stderr.count("Arena ") <= MAX_ARENAS
    untamed = ARENAS.replace("\ntame_allocator()", "")
    ran = subprocess.run([sys.executable, "-c", untamed], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stderr.count("Arena ") > MAX_ARENAS


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_freed_memory_goes_back_to_the_system_and_what_is_left_is_frozen() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True)
    returned_mb, num_frozen = ran.stdout.split()
    assert float(returned_mb) > 100
    assert int(num_frozen) > 1000
    assert gc.get_freeze_count() == 0, "the test's own process stays as it is"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no timer slack")
def test_sleeps_of_the_thread_end_in_time() -> None:
    script = (
        "from common.base.process import sharpen_sleeps\n"
        "sharpen_sleeps(); print(open('/proc/self/timerslack_ns').read())"
    )
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(ran.stdout) == TIMER_SLACK_NS
