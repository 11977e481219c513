"""A process starts with the limit that shells give, and takes what the system allows."""

import subprocess
import sys

import pytest

CODE = """
import resource
from common.base.process import raise_open_files
print(raise_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("soft", "hard"), [(256, 512), (512, 512)])
def test_the_soft_limit_is_raised_to_the_hard_one(soft: int, hard: int) -> None:
    shell = f'ulimit -Sn {soft} && ulimit -Hn {hard} && "$@"'
    argv = ["bash", "-c", shell, "bash", sys.executable, "-c", CODE]
    run = subprocess.run(argv, capture_output=True, timeout=60, text=True, check=True)
    assert run.stdout.split() == [str(hard), str(hard)]
