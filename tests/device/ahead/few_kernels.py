"""Compiles a few kernels ahead, or finds them: `python -m tests.device.ahead.few_kernels write|find FILE CAPABILITY`.

Each is a process of its own, because Triton and torch are changed for good in it. `find FILE CARD` unpacks the file as
a worker on that card would, runs the same kernels, and prints a JSON line: warnings, and the names of
kernels found and compiled.
"""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported

import torch

from common.device.ahead import __main__ as ahead
from common.device.ahead.absent_gpu import META, cards_of, compile_instead_of_launching, pretend
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
    compile_instead_of_launching()
    warned: list[str] = []
    note = logging.Handler(logging.WARNING)
    note.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(note)
    assert unpack_kernels(str(path), META) == (not warned)
    with counted() as found, torch.inference_mode():
        run_all(tasks(config))
    print(json.dumps([warned, sorted(found.on_disk), sorted(found.compiled)]))


def main(what: str, path: Path, capability: str, model: str) -> None:
    config = Config(model=ModelSection(path=model))
    if what == "find":
        find(path, capability, ahead.tasks_of if model else few_tasks, config)
        return
    if not model:
        ahead.tasks_of = few_tasks
    ahead.compile_ahead(config, [capability], path)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], *(sys.argv[4:] or [""]))
