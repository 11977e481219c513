"""Bounded reads of files named by a user: a named pipe may have no writer, and a device no end."""

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
"""Longest wait for the writer of an unnamed pipe, such as a shell's, to end."""


def open_plain(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a regular file or an unnamed pipe and return its descriptor; raise OSError naming any other kind of file."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind == stat.S_IFREG or os.readlink(f"/proc/self/fd/{descriptor}").startswith("pipe:"):
        return descriptor
    os.close(descriptor)
    raise OSError(0, f"it is {KINDS.get(kind, 'no file')}, of which nobody knows when it ends: name a regular file")


def read_plain(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Read at most `most_bytes` of a regular file or an unnamed pipe; raises OSError."""
    return read_descriptor(open_plain(path), most_bytes)


def read_descriptor(descriptor: int, most_bytes: int) -> bytes:
    """Read at most `most_bytes` from a descriptor of `open_plain`, and close it; raises OSError."""
    with open(descriptor, "rb", buffering=0) as file:
        content, end_s = b"", time.monotonic() + WAIT_S
        while len(content) < most_bytes:
            if not select.select([file], [], [], max(0.0, end_s - time.monotonic()))[0]:
                raise OSError(0, f"it is a pipe that has not ended for {WAIT_S:g} s: name a regular file")
            if not (piece := file.read(most_bytes - len(content))):
                break
            content += piece
        return content
