"""`baton warm`: compile a model's kernels before any worker starts, on a machine without a GPU, too."""

import argparse
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from common.base.errors import ConfigError
from common.settings.argument_parser import Commands
from common.settings.config import WORKER_SECTIONS, Config
from common.settings.options import add_flags, from_flags, to_flags
from deploy.processes.exec_child import child_environment
from deploy.serve.model_source import find_model

DESCRIPTION = """\
Compile what workers warm up with for this model, for each known card of the given compute capabilities, and write all
kernels into one file, with the modules in C that launch them, for which a C compiler and Python's headers must be here.
Workers with --kernels-compiled FILE find them there and compile nothing. A file made from other sources, by another
Triton, or for another capability is refused with a warning that names the difference, and kernels are compiled as
without it; modules for another Python or C library are built anew. Give the options of the workers, because other sizes
need other kernels. Takes one or two minutes of two cores for a card and needs no GPU; of the model, config.json is
enough where weights are plain."""


def add_warm(commands: Commands) -> None:
    parser = commands.add_parser(
        "warm",
        usage="baton warm MODEL --out FILE [--capability X.Y,...] [option ...]",
        help="compile a model's kernels into a file ahead of any start; needs no GPU",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument("model.path", metavar="MODEL", help="as baton serve takes it, or a directory with config.json")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write")
    parser.add_argument(
        "--capability", default="9.0", metavar="X.Y,...",
        help="compute capabilities, of 8.0, 8.6, 8.9, 9.0, 10.0 and 12.0 (default: 9.0)",
    )  # fmt: skip
    add_flags(parser, Config, WORKER_SECTIONS)


def warm(args: argparse.Namespace) -> int:
    """Compile in another process, because this one loads no torch; return its exit status.

    Raises ConfigError before anything is compiled, if the compiler or the directory of the file is missing.
    """
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "Triton is not installed here, and baton warm compiles with it; pip install triton in the workers' version "
            "(constraints.txt has it), because a file of another version is refused"
        )
    if not os.access(args.out.absolute().parent, os.W_OK):
        raise ConfigError(f"--out {args.out}: {args.out.absolute().parent} is no directory that can be written to")
    config = from_flags(Config, args)
    path = Path(config.model.path).expanduser()
    if not (path / "config.json").is_file():
        path = find_model(config.model.path)
    config = replace(config, model=replace(config.model, path=str(path.absolute())))
    own = ["--out", str(args.out), "--capability", args.capability]
    command = [sys.executable, "-P", "-m", "common.device.ahead", *own, *to_flags(config, WORKER_SECTIONS)]
    return subprocess.run(command, env=child_environment(os.environ), check=False).returncode
