"""`python -m benchmarks.link_rate BYTES [ADDRESS PORT]`: the rate of a plain socket between two hosts.

Without an address it prints a port, receives, and prints GB/s; with an address it sends there. Imports nothing slow.
"""

import socket
import subprocess
import sys
import time
from collections.abc import Sequence

PIECE_BYTES = 1 << 20


def receive(num_bytes: int) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
        target = bytearray(PIECE_BYTES)
        with connection:
            connection.recv_into(target, 1)
            begin_s, place = time.perf_counter(), 1
            while place < num_bytes:
                place += connection.recv_into(target)
            print(num_bytes / (time.perf_counter() - begin_s) / 1e9)


def send(num_bytes: int, address: str, port: int) -> None:
    with socket.create_connection((address, port)) as connection:
        for _ in range(0, num_bytes, PIECE_BYTES):
            connection.sendall(bytes(PIECE_BYTES))


def rate(to: Sequence[str], origin: Sequence[str], address: str, num_bytes: int) -> float:
    """Return the rate in GB/s; `to` and `origin` are commands that run another on the host of each end."""
    command = [sys.executable, "-m", "benchmarks.link_rate", str(num_bytes)]
    with subprocess.Popen([*to, *command], stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        subprocess.run([*origin, *command, address, port], check=True)
        return float(receiver.stdout.readline())


if __name__ == "__main__":
    if sys.argv[2:]:
        send(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    else:
        receive(int(sys.argv[1]))
