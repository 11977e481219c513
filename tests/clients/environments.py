"""Where a client is installed: a virtual environment, or a directory of node modules."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PROGRAMS = Path(__file__).with_name("programs")
DEADLINE_S = 600

Kind = Literal["python", "node"]


@dataclass(frozen=True, slots=True)
class Environment:
    """One client's, and nobody else's."""

    directory: Path
    kind: Kind

    def run(self, command: Sequence[str | Path], *, cwd: Path, more: Mapping[str, str] | None = None) -> str:
        """What a command prints; raises SubprocessError when it fails or takes too long. Names are looked up here."""
        name, *arguments = map(str, command)
        own = self.directory / "bin" / name
        result = subprocess.run(
            [str(own) if own.exists() else name, *arguments],
            cwd=cwd,
            env={**os.environ, **(more or {})},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
        return result.stdout

    def run_program(self, name: str, *arguments: str) -> str:
        """The last line that one of `programs/` prints."""
        if self.kind == "node":  # looks for modules beside the file itself
            program = self.directory / name
            program.write_text((PROGRAMS / name).read_text(encoding="utf-8"), encoding="utf-8")
            return self.run(["node", program, *arguments], cwd=self.directory).splitlines()[-1]
        return self.run(["python", PROGRAMS / name, *arguments], cwd=self.directory).splitlines()[-1]


def make_environment(kind: Kind, directory: Path, requirements: Sequence[str]) -> Environment:
    """Install what is required, unless it has been."""
    environment, stamp = Environment(directory, kind), directory / "installed"
    wanted = "\n".join(requirements)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return environment
    directory.mkdir(parents=True, exist_ok=True)
    if kind == "node":
        names = [requirement.replace("==", "@") for requirement in requirements]
        subprocess.run(["npm", "install", "--silent", "--prefix", str(directory), *names], check=True)
    else:
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        subprocess.run([str(directory / "bin" / "pip"), "install", "--quiet", *requirements], check=True)
    stamp.write_text(wanted, encoding="utf-8")
    return environment
