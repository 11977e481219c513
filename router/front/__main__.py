"""`python -m router.front`: serve HTTP for the dispatcher at `router.front_endpoint` until a signal."""

import sys
from collections.abc import Sequence

from router.front.service import FrontService
from router.program import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process; return the exit status: 0, or 2 for a wrong setting."""
    description = "A front of Baton: serves HTTP, and has a router with the same router.front_endpoint dispatch."
    return run("python -m router.front", description, "front", FrontService, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
