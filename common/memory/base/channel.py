"""An end of a connection between a worker and its memory server: frames with a length prefix, and descriptors.

A channel never waits. Unsent frames are kept, up to a bound; an incomplete frame is not received yet.
"""

import array
import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator

from common.base.errors import WireError
from common.wire.messages.frames import MAX_FRAME_BYTES, decode, encode
from common.wire.messages.memory import MemoryHello, PoolRegion, WeightsRegion
from common.wire.messages.staging import StagingRegion
from common.wire.messages.worker import Message

LENGTH_BYTES = 4
READ_BYTES = 65_536
READ_AT_ONCE_BYTES = 4 * READ_BYTES
"""Limit per read, so an endless sender does not hold up other connections."""
MAX_UNSENT_BYTES = 4 * MAX_FRAME_BYTES
"""Unread bytes after which the other end counts as gone."""
MAX_DESCRIPTORS = 16


class Gone(Exception):
    """The other end is gone, or must be treated as gone."""


class HungUp(Gone):
    """The other end closed the connection, for example because its process ended."""


class Channel:
    """Non-blocking frames over a connected stream socket; owns the socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        self.unsent: deque[tuple[memoryview, int | None]] = deque()
        self.num_unsent_bytes = 0
        self.received = bytearray()
        self.descriptors: deque[int] = deque()

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """Send a message, or keep the message for `flush`; a descriptor arrives with its message.

        Raises Gone, also if too many bytes are unsent.
        """
        frame = encode(message)
        if self.num_unsent_bytes > MAX_UNSENT_BYTES:
            raise Gone(f"it has not read {MAX_UNSENT_BYTES} bytes")
        self.unsent.append((memoryview(len(frame).to_bytes(LENGTH_BYTES, "little") + frame), descriptor))
        self.num_unsent_bytes += LENGTH_BYTES + len(frame)
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes; raises Gone."""
        try:
            while self.unsent:
                data, descriptor = self.unsent[0]
                if descriptor is None:
                    num_sent = self.connection.send(data)
                else:
                    num_sent = socket.send_fds(self.connection, [data], [descriptor])
                self.unsent.popleft()
                self.num_unsent_bytes -= num_sent
                if num_sent < len(data):
                    self.unsent.appendleft((data[num_sent:], None))
        except BlockingIOError:
            return
        except OSError as error:
            raise HungUp(error.strerror) from None

    def receive(self) -> Iterator[tuple[Message, int | None]]:
        """Yield arrived messages, each with its descriptor; the caller closes descriptors.

        Raises Gone at the end of the connection, and for an invalid frame.
        """
        is_over = not self._read()
        while len(self.received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self.received[:LENGTH_BYTES], "little")
            if end - LENGTH_BYTES > MAX_FRAME_BYTES:
                raise Gone(f"it announced a frame of {end - LENGTH_BYTES} bytes")
            if len(self.received) < end:
                break
            with memoryview(self.received) as received:
                frame = bytes(received[LENGTH_BYTES:end])
            del self.received[:end]
            try:
                message = decode(frame)
            except WireError as error:
                raise Gone(str(error)) from None
            yield message, self.descriptors.popleft() if self.descriptors and _brings_one(message) else None
        if is_over:
            raise HungUp("it closed the connection")

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.popleft())
        self.connection.close()

    def _read(self) -> bool:
        """Read arrived bytes; return False at the end of the connection."""
        num_read = 0
        try:
            while num_read < READ_AT_ONCE_BYTES:
                data, ancillary, _, _ = self.connection.recvmsg(READ_BYTES, self.room, socket.MSG_CMSG_CLOEXEC)
                for level, kind, content in ancillary:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        items = array.array("i")
                        items.frombytes(content[: len(content) // items.itemsize * items.itemsize])
                        self._keep(items)
                if not data:
                    return False
                self.received += data
                num_read += len(data)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def _keep(self, descriptors: Iterable[int]) -> None:
        """Keep up to `MAX_DESCRIPTORS`, and close others, so a sender cannot use up this process's descriptors."""
        for descriptor in descriptors:
            if len(self.descriptors) < MAX_DESCRIPTORS:
                self.descriptors.append(descriptor)
            else:
                os.close(descriptor)


def _brings_one(message: Message) -> bool:
    """Tell whether a descriptor comes with the message."""
    return isinstance(message, MemoryHello | StagingRegion) or (
        isinstance(message, WeightsRegion | PoolRegion) and not message.handle
    )
