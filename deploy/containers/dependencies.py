"""What to install beside the package: the requirements of pyproject.toml, a line each.

    python deploy/containers/dependencies.py [EXTRA ...]

So an image has them in a layer of its own, which an edit of a source file leaves as it is. Reads the pyproject.toml of
the working directory, and imports the standard library only.
"""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: str, extras: list[str]) -> list[str]:
    """Of a pyproject.toml's text; raises KeyError for an extra that it has not."""
    project = tomllib.loads(pyproject)["project"]
    optional: dict[str, list[str]] = project["optional-dependencies"]
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml").read_text(encoding="utf-8"), sys.argv[1:])))
