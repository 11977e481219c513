"""TCP ports that nobody else gets."""

import socket
from typing import Self


class ReservedPort:
    """A free one, bound here without listening: a server of ours can have it, connections of others never do."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as whoever is to listen sets it, too
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()
