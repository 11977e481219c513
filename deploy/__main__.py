"""Start the `baton` command; also report failures before the command itself can, in a single line."""

import os
import signal
import sys

from deploy.processes.early import begin_early

INTERRUPTED = 130
"""Exit status of a program ended by Ctrl-C in a shell."""


def main() -> None:
    """Import the command, which takes a second, and run the command."""
    signal.signal(signal.SIGINT, _end)
    open_streams()
    early = begin_early(sys.argv[1:], os.environ)
    try:
        from deploy.cli import main as run
    except (ImportError, MemoryError, OSError, RuntimeError) as error:
        os.write(sys.stderr.fileno(), f"baton: cannot start: {type(error).__name__}: {error}\n".encode())
        sys.exit(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run(early)


def open_streams() -> None:
    """Open closed standard streams on /dev/null, because a socket with such a descriptor would be written to."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
    sys.stdin, sys.stdout, sys.stderr = (
        stream or os.fdopen(number, mode, encoding="utf-8", closefd=False)
        for number, (stream, mode) in enumerate(((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w")))
    )


def _end(number: int, frame: object) -> None:
    os.write(sys.stderr.fileno(), b"baton: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
