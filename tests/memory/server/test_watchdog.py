"""A process that hangs ends by itself, and says where it stood; one that does not lives on."""

import subprocess
import sys

import pytest

PROGRAM = """
import time
from common.memory.server.server import Watchdog
watchdog = Watchdog(0.3)
def stand(duration_s):
    watchdog.alive()
    watchdog._armed_s = 0.0
    time.sleep(duration_s)
for _ in range(20):
    stand(0.02)
print("alive", flush=True)
{last}
print("at the end", flush=True)
"""


@pytest.mark.medium
@pytest.mark.parametrize(
    ("last", "status", "said"),
    [("stand(60)", 1, "alive\n"), ("watchdog.stop(); time.sleep(0.6)", 0, "alive\nat the end\n")],
    ids=["hangs", "stops"],
)
def test_who_hangs_ends_and_says_where(last: str, status: int, said: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(last=last)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (status, said)
    assert ("in stand" in ended.stderr) == bool(status)
