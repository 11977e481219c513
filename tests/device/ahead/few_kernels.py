"""Compiles a few kernels ahead, or finds them: `python -m tests.device.ahead.few_kernels` reads orders, lines of JSON.

An order has variables of the environment, and arguments: `write|find FILE CAPABILITY MODEL`. Each is a forked process
of its own, because Triton and torch are changed for good in it. `find` unpacks the file as a worker on a card of that
capability would, runs the same kernels, and loads what would launch them. It prints a JSON line: warnings, the names of
kernels found and compiled, and the names of extensions in C that were built. A line `status N` ends what one prints.
"""

import ctypes
import json
import logging
import os
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported

import torch
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build
from triton.runtime._async_compile import FutureKernel

from common.device.ahead import __main__ as ahead
from common.device.ahead.absent_gpu import META, cards_of, compile_instead_of_launching, pretend
from common.device.ahead.extensions import LIBRARY, make_library
from common.device.steps.kernel_file import counted
from common.device.steps.warm_up import run_all, unpack_kernels
from common.kernels.elementwise.embedding import embedding
from common.models.base import Task
from common.settings.config import Config, ModelSection


def few_tasks(config: Config) -> list[Task]:
    """Two kernels, one of them twice."""
    token_ids = torch.empty(8, dtype=torch.int32, device=META)
    table = torch.empty(300, 256, dtype=torch.bfloat16, device=META)
    tasks: list[Task] = [lambda: embedding(token_ids, table, pdl=False)] * 2
    return [*tasks, lambda: ahead.update_rows(8)]


def find(path: Path, capability: str, tasks: Any, config: Config) -> None:
    card = cards_of(capability)[0]
    pretend(card)
    kernels: list[Any] = []
    compile_instead_of_launching(kernels.append)
    warned: list[str] = []
    note = logging.Handler(logging.WARNING)
    note.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(note)
    assert unpack_kernels(str(path), META) == (not warned)
    with counted() as found, torch.inference_mode():
        run_all(tasks(config))
    built = built_to_launch(kernels)
    print(json.dumps([warned, sorted(found.on_disk), sorted(found.compiled), built]))


def built_to_launch(kernels: list[Any]) -> list[str]:
    """Load Triton's own driver and a launcher for each kernel; return the names of the extensions built for that."""
    built, really_build = list[str](), build._build

    def noted(name: str, *args: Any) -> str:
        built.append(name)
        return str(really_build(name, *args))

    with TemporaryDirectory() as place:
        make_library(Path(place))
        build._build = noted
        ctypes.CDLL(str(Path(place) / LIBRARY))  # extensions look for a library of this name among those loaded
        knobs.nvidia.libcuda_path = place
        utils = nvidia.CudaUtils()
        nvidia.triton.runtime.driver.active.utils = utils
        for kernel in kernels:
            whole = kernel.result() if isinstance(kernel, FutureKernel) else kernel
            assert callable(nvidia.CudaLauncher(whole.src, whole.metadata).launch)
    assert type(utils.load_binary).__name__ == "builtin_function_or_method", "compiled code"
    return sorted(built)


def run(what: str, path: Path, capability: str, model: str) -> None:
    config = Config(model=ModelSection(path=model))
    if what == "find":
        find(path, capability, ahead.tasks_of if model else few_tasks, config)
        return
    if not model:
        ahead.tasks_of = few_tasks
    ahead.compile_ahead(config, [capability], path)


def forked(environ: dict[str, str], what: str, path: str, capability: str, model: str) -> int:
    """Run one in a process that has imported all; return its exit status."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        os.environ.update(environ)
        run(what, Path(path), capability, model)
        sys.stdout.flush()
        status = 0
    finally:
        if status:
            traceback.print_exc()
        os._exit(status)


def main() -> None:
    for line in sys.stdin:
        environ, arguments = json.loads(line)
        print("status", forked(environ, *arguments), flush=True)


if __name__ == "__main__":
    main()
