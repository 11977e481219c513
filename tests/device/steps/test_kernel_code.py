"""Where a kernel lies on disk is no matter of chance, and threads that want one at once get one."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from common.device.steps.jit_source import block
from common.device.steps.launchers import OneOfEach

ROOT = Path(__file__).parents[3]
HASHES = """
import json, sys
from common.device.steps.kernel_code import functions, hash_helpers_first
found = list(functions())
before = [function.hash for function in found]
for function in found:
    function.hash, function.used_global_vals = None, {}
for function in reversed(found):
    hash_helpers_first(function)
print(json.dumps([[function.__name__, first, function.hash] for function, first in zip(found, before)]))
"""


@pytest.mark.medium
def test_hashes_do_not_depend_on_what_was_hashed_before() -> None:
    environ = os.environ | {"TRITON_INTERPRET": "0"}  # which has no hashes
    said = subprocess.run([sys.executable, "-c", HASHES], cwd=ROOT, env=environ, capture_output=True, timeout=120)
    functions = json.loads(said.stdout or said.stderr)
    assert len(functions) > 100
    assert [name for name, first, second in functions if first != second] == []


SOURCES = """
import inspect, json
from common.device.steps.jit_source import block
blocks = []
def compared(lines, read=inspect.getblock):
    blocks.append([lines[0], block(lines), read(lines)])
    return blocks[-1][2]
inspect.getblock = compared
import common.device.steps.kernel_code
print(json.dumps(blocks))
"""


@pytest.mark.medium
def test_functions_that_are_found_by_indentation_are_those_that_tokens_give() -> None:
    quick = "from common.device.steps import jit_source; jit_source.quick_blocks = __import__('contextlib').nullcontext"
    environ = os.environ | {"TRITON_INTERPRET": "0"}
    said = subprocess.run(
        [sys.executable, "-c", f"{quick}\n{SOURCES}"], cwd=ROOT, env=environ, capture_output=True, timeout=120
    )
    blocks = json.loads(said.stdout or said.stderr)
    sure = [(found, expected) for _, found, expected in blocks if found]
    assert len(sure) > 300 and len(sure) > 0.9 * len(blocks), "most are found"
    assert [found for found, expected in sure if found != expected] == []


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("def f(x):\n    return x\n\n\nY = 1\n", 2),
        ("@jit\ndef f(x,\n      y):  # fmt: skip\n    return x\n    # why\n# of g\ndef g(): ...\n", 5),
        ("@jit(\n    a=1\n)\ndef f(\n    x: T = g(1),\n) -> T:\n    return x\n", 7),
        ('def f(x):\n    """One\ntwo\n    """\n    return x\n', 0),
        ("f = lambda x: (\n    x\n)\n", 0),
        ("    def inner(x):\n        return x\n", 0),
        ("def f(x): return x\nY = 1\n", 0),
    ],
)
def test_where_the_end_of_a_function_is_not_sure_tokens_are_read(text: str, lines: int) -> None:
    given = text.splitlines(keepends=True)
    assert block(given) == given[:lines]


class Slow(ThreadPoolExecutor):
    """Other threads get to run while it takes a task."""

    num_tasks = 0

    def submit(self, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.num_tasks += 1
        time.sleep(0.01)
        return super().submit(task, *args, **kwargs)


def test_threads_that_ask_at_once_get_the_same_kernel() -> None:
    asked = Barrier(8)

    def ask(_: int) -> Any:
        asked.wait()
        return mode.submit("key", object, lambda kernel: kernel)

    with Slow(8) as loaders, ThreadPoolExecutor(8) as runners, OneOfEach(loaders) as mode:
        kernels = list(runners.map(ask, range(8)))
    assert loaders.num_tasks == 1
    assert len({id(kernel) for kernel in kernels}) == 1
