"""Becomes a worker at once when one has died: it has imported by then what takes seconds, and waits to be told which.

    python -P -m deploy.spare MODULE...      imports these, then reads one line of JSON, which `order` writes

Nothing of a device is touched before. At the end of its input it ends.
"""

import importlib
import json
import os
import runpy
import sys

from deploy.launch_plan import ProcessSpec


def order(spec: ProcessSpec) -> bytes:
    """What tells a spare to become that process."""
    return json.dumps([spec.module, list(spec.flags), dict(spec.env)]).encode() + b"\n"


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    if line := sys.stdin.readline():
        become(line)


def become(line: str | bytes) -> None:
    """Be the process that `order` wrote, without an input, to its end."""
    module, flags, env = json.loads(line)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    os.environ.update(env)
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
