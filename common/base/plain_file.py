"""Reads files that a user names, without waiting for ever: a named pipe may have nobody who writes, a device no end."""

import os
import select
import stat
import time

KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
WAIT_S = 10.0
"""For who writes to a pipe without a name, as of a shell, to be done with it."""


def open_plain(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file, or of a pipe without a name; raises OSError, saying what it is, for others."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind == stat.S_IFREG or os.readlink(f"/proc/self/fd/{descriptor}").startswith("pipe:"):
        return descriptor
    os.close(descriptor)
    raise OSError(0, f"it is {KINDS.get(kind, 'no file')}, of which nobody knows when it ends: name a regular file")


def read_plain(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """The first so many bytes of a regular file, or of what comes out of a pipe without a name; raises OSError."""
    return read_descriptor(open_plain(path), most_bytes)


def read_descriptor(descriptor: int, most_bytes: int) -> bytes:
    """The same of what `open_plain` opened, which is closed."""
    with open(descriptor, "rb", buffering=0) as file:
        content, end_s = b"", time.monotonic() + WAIT_S
        while len(content) < most_bytes:
            if not select.select([file], [], [], max(0.0, end_s - time.monotonic()))[0]:
                raise OSError(0, f"it is a pipe that has not ended for {WAIT_S:g} s: name a regular file")
            if not (piece := file.read(most_bytes - len(content))):
                break
            content += piece
        return content
