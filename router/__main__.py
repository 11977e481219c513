"""`python -m router`: serve until a signal; the first signal drains, the second stops at once."""

import sys
from collections.abc import Sequence

from router.program import run
from router.service import Service


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process; return the exit status: 0, or 2 for a wrong setting."""
    description = "HTTP side of Baton: takes completions and has workers compute them."
    return run("python -m router", description, "router", Service, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
