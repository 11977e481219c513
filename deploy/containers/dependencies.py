"""Print packages to install beside this package: the requirements of pyproject.toml, a line each.

    python deploy/containers/dependencies.py [EXTRA ...]

So an image has dependencies in a separate layer, unchanged by an edit of a source file. Reads the pyproject.toml of the
working directory, and imports the standard library only.
"""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: str, extras: list[str]) -> list[str]:
    """Return the requirements in the text of a pyproject.toml; raises KeyError for an unknown extra."""
    project = tomllib.loads(pyproject)["project"]
    optional: dict[str, list[str]] = project["optional-dependencies"]
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml").read_text(encoding="utf-8"), sys.argv[1:])))
