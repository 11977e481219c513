"""A memory server's share of a core, and workers' waits for blocks: without a model, torch or a GPU.

    python -m benchmarks.memory --requests-per-s 1000 --blocks 64 --steps-per-s 100 --pairs 4

Pairs of prefill and decode workers use a shared pool like real workers. In each step the prefill worker leases blocks
for its prompts, and offers the blocks once leased. The decode worker accepts the blocks, and frees them later. Each
pair is a process. A lease is timed from the request to the blocks. Blocks are always plentiful, so a lease takes the
time of the server, of the wire and of a process with other work. After the pairs, a single worker matches prefixes and
seals blocks by turns (`memory_cases`).
"""

import argparse
import multiprocessing
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.memory_cases import measure_cases
from common.base.percentiles import percentile
from common.memory.client.client import MemoryClient
from common.wire.messages.memory import (
    BlocksFreed,
    BlocksLeased,
    BlocksWanted,
    KVAccepted,
    KVOffer,
    KVReceived,
    PoolShortage,
)
from common.wire.values.kv_layout import CacheKind, KVGroup, KVLayout
from common.wire.values.packing import pack_ids, unpack_ids
from deploy.bench.origin import ROOT

LAYOUT = KVLayout("benchmark", (KVGroup(CacheKind.FULL, 1, 1, 1, 16, 0, "float16"),))
NUM_BLOCKS = 50_000
"""Blocks of Qwen3-4B in an H200."""
HELD_S = 0.2
"""Seconds between a prompt's acceptance and the release of its blocks."""
SETTLE_S = 1.0
START_DEADLINE_S = 30.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a pair."""

    requests_per_s: float
    steps_per_s: float
    num_blocks: int  # of a request
    duration_s: float


class Pair:
    """A prefill worker and a decode worker, by turns in a thread."""

    def __init__(self, path: Path, number: int, load: Load) -> None:
        self.load, self.worker = load, (f"decode-{number}", 1)
        self.prefill = MemoryClient(path, f"prefill-{number}", 1, is_decoding=False)
        self.decode = MemoryClient(path, *self.worker, is_decoding=True)
        for client in (self.prefill, self.decode):
            descriptor = client.claim_pool(LAYOUT, (NUM_BLOCKS,)).descriptor
            assert descriptor is not None, "a pool in host memory"
            os.close(descriptor)
        self.num_begun, self.num_late = 0, 0
        self.wanted_s = 0.0  # time of the request for blocks; 0 without a request
        self.leased: list[tuple[int, int]] = []  # blocks with their generations
        self.held: deque[tuple[float, KVOffer]] = deque()  # with the time of release
        self.waits_s: list[float] = []

    def run(self) -> None:
        begin_s = time.monotonic()
        step_s, num_steps = 1 / self.load.steps_per_s, 0
        while (now_s := time.monotonic()) < begin_s + self.load.duration_s:
            if now_s >= begin_s + num_steps * step_s:
                num_steps += 1
                self.step(now_s, round(num_steps * step_s * self.load.requests_per_s))
            left_s = begin_s + num_steps * step_s - time.monotonic()
            select.select([self.prefill.connection, self.decode.connection], [], [], max(0.0, left_s))
            self.receive()

    def step(self, now_s: float, num_due: int) -> None:
        """Send the messages of a step of both workers; `num_due` requests are to have begun by now."""
        if self.wanted_s:
            self.num_late += 1  # the last step's blocks are not here yet
        elif num_due > self.num_begun:
            self.wanted_s = time.monotonic()
            self.prefill.send(BlocksWanted(((num_due - self.num_begun) * self.load.num_blocks,)))
            self.num_begun = num_due
        freed = []
        while self.held and self.held[0][0] < now_s:
            freed.append(self.held.popleft()[1])
        if freed:
            ids, generations = (
                b"".join(part) for part in zip(*((o.block_ids, o.generations) for o in freed), strict=True)
            )
            self.decode.send(BlocksFreed(ids, generations))

    def receive(self) -> None:
        for message in self.prefill.receive(BlocksLeased, PoolShortage, KVReceived):
            if isinstance(message, BlocksLeased):
                self.waits_s.append(time.monotonic() - self.wanted_s)
                self.wanted_s = 0.0
                self.leased += zip(unpack_ids(message.block_ids), unpack_ids(message.generations), strict=True)
                self.offer()
        for message in self.decode.receive(KVOffer, PoolShortage):
            if isinstance(message, KVOffer):
                self.decode.send(KVAccepted(message.request_id, message.attempt))
                self.held.append((time.monotonic() + HELD_S, message))

    def offer(self) -> None:
        """Offer all prompts of the step with the leased blocks."""
        while self.leased:
            blocks, self.leased = self.leased[: self.load.num_blocks], self.leased[self.load.num_blocks :]
            ids, generations = (pack_ids(part) for part in zip(*blocks, strict=True))
            key = f"r{self.num_begun}-{len(self.leased)}"
            no_flags = bytes(-(-len(blocks) // 8))
            self.prefill.send(KVOffer(*self.worker, key, 0, 0, ids, generations, no_flags, b"", b""))

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


def run_pair(path: Path, number: int, load: Load, results: "Queue[tuple[list[float], int, int]]") -> None:
    """Run a pair: the target of a process."""
    with closing(Pair(path, number, load)) as pair:
        pair.run()
        results.put((pair.waits_s, pair.num_begun, pair.num_late))


@contextmanager
def server(directory: Path) -> Iterator[tuple[int, Path]]:
    """Run a memory server on the CPU; yield its process id and socket."""
    path = directory / "memory.sock"
    command = [sys.executable, "-m", "common.memory", "--memory-device", "cpu", "--memory-socket", str(path),
               "--net-router-endpoint", f"ipc://{directory}/router", "--log-level", "WARNING"]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            end_s = time.monotonic() + START_DEADLINE_S
            while not path.exists() and process.poll() is None and time.monotonic() < end_s:
                time.sleep(0.05)
            if not path.exists():
                raise SystemExit(f"no memory server within {START_DEADLINE_S:g} s")
            yield process.pid, path
        finally:
            process.terminate()


def cpu_s(pid: int) -> float:
    """Return the processor time used by a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def measure(args: argparse.Namespace) -> list[Table]:
    """Run the pairs and the cases, and return tables."""
    load = Load(args.requests_per_s / args.pairs, args.steps_per_s, args.blocks, args.duration_s + 2 * SETTLE_S)
    spawn = multiprocessing.get_context("spawn")
    results: Queue[tuple[list[float], int, int]] = spawn.Queue()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory, server(Path(directory)) as (pid, path):
        pairs = [spawn.Process(target=run_pair, args=(path, n, load, results)) for n in range(args.pairs)]
        for pair in pairs:
            pair.start()
        time.sleep(2 * SETTLE_S)
        begin_s, before_s = time.monotonic(), cpu_s(pid)
        time.sleep(args.duration_s)
        share = (cpu_s(pid) - before_s) / (time.monotonic() - begin_s)
        told = [results.get(timeout=load.duration_s) for _ in pairs]
        for pair in pairs:
            pair.join()
        cases = measure_cases(path, LAYOUT, NUM_BLOCKS, args.case_s, partial(cpu_s, pid))
    waits_s = sorted(wait_s for waits_s, _, _ in told for wait_s in waits_s)
    what = f"{args.requests_per_s:g} requests/s of {args.blocks} blocks, {args.steps_per_s:g} steps/s"
    table = Table("figure", "value", title=f"{args.pairs} pairs, {what}")
    table.add_row("requests/s begun", f"{sum(n for _, n, _ in told) / load.duration_s:.0f}")
    table.add_row("share of a core", f"{share:.0%}")
    for percent in (50, 99):
        table.add_row(f"lease p{percent}", f"{percentile(waits_s, percent) * 1e3:.2f} ms")
    table.add_row("steps without their blocks", str(sum(num_late for _, _, num_late in told)))
    return [table, cases]


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests-per-s", type=float, default=1000.0, help="of all (default: %(default)g)")
    parser.add_argument("--blocks", type=int, default=64, help="of a request (default: %(default)s)")
    parser.add_argument("--steps-per-s", type=float, default=100.0, help="of each worker (default: %(default)g)")
    parser.add_argument("--pairs", type=int, default=4, help="of workers (default: %(default)s)")
    parser.add_argument("--duration-s", type=float, default=10.0, help="that counts (default: %(default)g)")
    parser.add_argument("--case-s", type=float, default=2.0, help="of each match or seal (default: %(default)g)")
    Console().print(*measure(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
