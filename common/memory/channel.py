"""One end of a connection between a worker and its memory server: frames behind their length, and descriptors.

Never waits: what cannot be sent yet is kept, up to a bound, and what has not all arrived is not received yet.
"""

import array
import os
import socket
from collections import deque
from collections.abc import Iterator

from common.errors import WireError
from common.wire.frames import decode, encode
from common.wire.messages import Message

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 65_536
MAX_UNSENT = 10_000
"""Messages; who reads none of so many is gone."""
MAX_DESCRIPTORS = 16


class Gone(Exception):
    """The other end is gone, or to be treated so."""


class HungUp(Gone):
    """The other end is gone by itself, as it is when its process ends."""


class Channel:
    """Takes a connected stream socket over.

    Args:
        takes_descriptors: else those that the other end sends are closed by the kernel.
    """

    def __init__(self, connection: socket.socket, *, takes_descriptors: bool) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize) if takes_descriptors else 0
        self.unsent: deque[tuple[memoryview, int | None]] = deque()
        self.received = bytearray()
        self.descriptors: deque[int] = deque()

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """Send, or keep for `flush`; a descriptor arrives with its message. Raises Gone."""
        if len(self.unsent) >= MAX_UNSENT:
            raise Gone(f"it has not read {MAX_UNSENT} messages")
        frame = encode(message)
        self.unsent.append((memoryview(len(frame).to_bytes(LENGTH_BYTES, "little") + frame), descriptor))
        self.flush()

    def flush(self) -> None:
        """Send what can be sent; raises Gone."""
        try:
            while self.unsent:
                data, descriptor = self.unsent[0]
                descriptors = [] if descriptor is None else [descriptor]
                num_sent = socket.send_fds(self.connection, [data], descriptors)
                self.unsent.popleft()
                if num_sent < len(data):
                    self.unsent.appendleft((data[num_sent:], None))
        except BlockingIOError:
            return
        except OSError as error:
            raise HungUp(error.strerror) from None

    def receive(self) -> Iterator[Message]:
        """What has arrived; raises Gone at the end of it, and for what is no message."""
        is_over = not self._read()
        while len(self.received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self.received[:LENGTH_BYTES], "little")
            if end - LENGTH_BYTES > MAX_FRAME_BYTES:
                raise Gone(f"it announced a frame of {end - LENGTH_BYTES} bytes")
            if len(self.received) < end:
                break
            frame = bytes(self.received[LENGTH_BYTES:end])
            del self.received[:end]
            try:
                yield decode(frame)
            except WireError as error:
                raise Gone(str(error)) from None
        if is_over:
            raise HungUp("it closed the connection")

    def take_descriptor(self) -> int | None:
        """The first that came along and was not taken; the caller closes it."""
        return self.descriptors.popleft() if self.descriptors else None

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.popleft())
        self.connection.close()

    def _read(self) -> bool:
        """Take what has arrived; False when no more will."""
        try:
            while len(self.received) <= MAX_FRAME_BYTES + LENGTH_BYTES:
                data, ancillary, _, _ = self.connection.recvmsg(MAX_FRAME_BYTES, self.room, socket.MSG_CMSG_CLOEXEC)
                for level, kind, content in ancillary:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        items = array.array("i")
                        items.frombytes(content[: len(content) // items.itemsize * items.itemsize])
                        self.descriptors.extend(items)
                if not data:
                    return False
                self.received += data
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True
