"""Starts the `baton` command: what goes wrong before it can speak for itself ends with a line, too."""

import os
import signal
import sys

INTERRUPTED = 130
"""Exit status of who is ended by Ctrl-C in a shell."""


def main() -> None:
    """Import the command, which takes a second, and run it."""
    signal.signal(signal.SIGINT, _end)
    open_streams()
    try:
        from deploy.cli import main as run
    except (ImportError, MemoryError, OSError, RuntimeError) as error:
        os.write(sys.stderr.fileno(), f"baton: cannot start: {type(error).__name__}: {error}\n".encode())
        sys.exit(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def open_streams() -> None:
    """Have what was closed lead nowhere: a socket that got its descriptor would be written to."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest descriptor that is free
    sys.stdin, sys.stdout, sys.stderr = (
        stream or os.fdopen(number, mode, encoding="utf-8", closefd=False)
        for number, (stream, mode) in enumerate(((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w")))
    )


def _end(number: int, frame: object) -> None:
    os.write(sys.stderr.fileno(), b"baton: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
