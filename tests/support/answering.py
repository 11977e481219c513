"""A program that is no server of ours."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread


@contextmanager
def answering(answer: bytes, times: int = 1) -> Iterator[str]:
    """A URL where everybody is told that, so many times; and no end of it after more than one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_one() -> None:
            with listener.accept()[0] as connection, suppress(OSError):
                connection.recv(65536)
                for _ in range(times):
                    connection.sendall(answer)
                if times > 1:
                    connection.recv(1)

        thread = Thread(target=answer_one)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(60)
