"""Rates of pulls by NIXL on one host, beside plain copies of as many bytes: TCP over loopback, and shared memory.

    python -m benchmarks.between_hosts [--transports tcp tcp,sm] [--lengths 1024 8192] [--staged] [--device cuda:0]

Both ends use the same cores. So figures are shares of a plain copy's rate, measured between the pulls: of a socket for
TCP, of memory with `sm`. On a GPU they are GB/s of staged pulls, and of pulls by CUDA IPC. Every byte is compared once
for each length before the timing.
"""

import argparse
import multiprocessing
import secrets
import socket
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from benchmarks.handoff import exporter, layout_of
from benchmarks.handoff_exporter import lending
from benchmarks.presets import PRESETS
from benchmarks.pulls import HandoffBench
from common.base.errors import BatonError
from common.memory.base.slots import slots_for
from common.memory.client.gate_connection import Gate
from deploy.bench.origin import hardware
from deploy.bench.results import Row, append_rows, row_of
from deploy.bench.stats import Figure

PIECE_BYTES = 1 << 20
POLL_S = 0.0002
ROUNDS = 5
"""Turns of pulls and plain copies, so that both meet the same load of the machine."""


def socket_rate(num_bytes: int) -> float:
    """Return the rate at which another process sends bytes through loopback TCP, in GB/s."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        context = multiprocessing.get_context("spawn")
        sender = context.Process(target=_send, args=(server.getsockname()[1], num_bytes), daemon=True)
        sender.start()
        connection, _ = server.accept()
        target = np.ones(num_bytes, np.uint8)  # pages exist
        with connection:
            connection.recv_into(target.data[:1])
            begin_s, place = time.perf_counter(), 1
            while place < num_bytes:
                place += connection.recv_into(target.data[place : place + PIECE_BYTES])
            seconds = time.perf_counter() - begin_s
        sender.join()
    return num_bytes / seconds / 1e9


def _send(port: int, num_bytes: int) -> None:
    source = np.ones(num_bytes, np.uint8)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(source.data)


def copy_rate(num_bytes: int, block_bytes: int) -> float:
    """Return the rate of copies of whole blocks inside this process, in GB/s."""
    source = np.ones((num_bytes // block_bytes, block_bytes), np.uint8)
    target = np.ones_like(source)  # pages exist
    begin_s = time.perf_counter()
    for index in np.random.default_rng(0).permutation(len(source)):
        target[index] = source[index]
    return source.nbytes / (time.perf_counter() - begin_s) / 1e9


def pull_s(bench: HandoffBench, num_blocks: int) -> float:
    """Return the seconds of a pull of random blocks, polled as by a loop with other work."""
    ids = [np.random.default_rng().permutation(len(bench.blocks))[:num_blocks].tolist() for _ in range(2)]
    begin_s = time.perf_counter()
    pull = bench.peer.pull(ids[0], bench.pool, ids[1])
    while not pull.done():
        time.sleep(POLL_S)
    return time.perf_counter() - begin_s


def measure(args: argparse.Namespace, transports: str, num_tokens: int) -> list[Figure]:
    """Return the median share of a plain copy's rate; on a GPU, rates."""
    layout = layout_of(args.preset, args.num_layers, args.block_size, "bfloat16")
    [group] = layout.groups
    num_blocks, is_copy = group.num_places(num_tokens), "sm" in transports.split(",")
    with tempfile.TemporaryDirectory(prefix="baton-") as directory:
        secret = Path(directory) / "secret"
        secret.touch(0o600)
        secret.write_text(secrets.token_hex(32))
        flags = str(secret), transports
        device, num_bytes = torch.device(args.device), num_blocks * group.block_bytes
        with exporter(args.device, num_blocks + 2, layout, *flags) as export:
            slots = slots_for(layout) if args.staged or device.type != "cpu" else None
            gate = Gate(export.gate, lending(*flags), slots=slots)
            with closing(HandoffBench(export, device, gate)) as bench:
                bench.verify(num_blocks)
                if device.type != "cpu":
                    rates = [Figure("rate", rate(args, bench, num_blocks, num_bytes), "GB/s")]
                    with closing(HandoffBench(export, device)) as by_ipc:
                        return [*rates, Figure("ipc_rate", rate(args, by_ipc, num_blocks, num_bytes), "GB/s")]
                shares = []
                for _ in range(ROUNDS):
                    plain = copy_rate(num_bytes, group.block_bytes) if is_copy else socket_rate(num_bytes)
                    shares.append(rate(args, bench, num_blocks, num_bytes) / plain)
    return [Figure("of_copy" if is_copy else "of_socket", 100 * statistics.median(shares), "%")]


def rate(args: argparse.Namespace, bench: HandoffBench, num_blocks: int, num_bytes: int) -> float:
    """Return the median rate of pulls, in GB/s."""
    return num_bytes / statistics.median(pull_s(bench, num_blocks) for _ in range(args.repeats)) / 1e9


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.between_hosts", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--transports", nargs="+", default=["tcp", "tcp,sm"], help="of UCX, in turn")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024], help="prompt tokens (default: 1024)")
    parser.add_argument("--device", default="cpu", help="cuda:N or cpu, of both pools (default: %(default)s)")
    parser.add_argument("--staged", action="store_true", help="through staging on a CPU, too")
    parser.add_argument("--repeats", type=int, default=5, help="timed pulls a turn (default: %(default)s)")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="qwen3-4b", help="model (default: %(default)s)")
    parser.add_argument("--num-layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="file to append a row a run to")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run the benchmark; return 1 if no pull was possible or wrong bytes arrived."""
    args, rows = parse_args(argv), list[Row]()
    for transports in args.transports:
        for num_tokens in args.lengths:
            try:
                figures = measure(args, transports, num_tokens)
            except BatonError as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                return 1
            how = f"{transports}, staged" if args.staged or args.device != "cpu" else transports
            workload = f"pull of {num_tokens} tokens by NIXL on one host, {how}"
            for figure in figures:
                print(f"{workload}: {figure.value:.3g} {figure.unit} {figure.name}")
                rows.append(row_of(hardware(), args.preset, workload, figure))
    if args.results:
        append_rows(args.results, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
