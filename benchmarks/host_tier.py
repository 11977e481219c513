"""Speed of a memory server's host tier without a model: GB/s to host memory and back, and delays of other workers.

    python -m benchmarks.host_tier --device cuda:0 --tier-gb 40

A worker seals blocks of Qwen3-4B's size and waits until copies are in host memory. The worker then takes the whole pool
for a moment, and asks for the blocks again. Another worker only knocks. Its answer times are taken while nothing is
copied, while host memory is pinned, and while blocks go and come. Any worker would notice the same delays.
"""

import argparse
import multiprocessing
import os
import select
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from enum import IntEnum
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from typing import TypeAlias, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks.memory_cases import new_keys
from common.base.percentiles import percentile
from common.base.version import VERSION
from common.memory.client.client import MemoryClient
from common.memory.devices.cuda_backing import CudaBacking
from common.memory.devices.host_backing import HostBacking
from common.memory.server.announcer import Announcer
from common.memory.server.server import MemoryServer
from common.settings.config import NetSection
from common.settings.memory_sections import MemorySection
from common.wire.messages.memory import (
    BlocksFreed,
    BlocksLeased,
    BlocksSealed,
    BlocksWanted,
    MemoryKnock,
    PoolShortage,
    PromptBlocks,
    PromptWanted,
)
from common.wire.messages.memory_reports import MemoryReady
from common.wire.values.kv_layout import CacheKind, KVGroup, KVLayout
from deploy.bench.workload import numbers

LAYOUT = KVLayout("benchmark", (KVGroup(CacheKind.FULL, 36, 8, 128, 16, 0, "bfloat16"),))
BLOCK_BYTES = LAYOUT.groups[0].block_bytes
SLOW_US = 1_000_000
"""Claimed time to compute a block, so long that every block is restored."""
PAUSE_S = 0.001
DEADLINE_S = 120.0


class Phase(IntEnum):
    """The server's activity during a knock."""

    PINNED = 0
    IDLE = 1
    OUT = 2
    BACK = 3
    OVER = 4


Told: TypeAlias = "SynchronizedArray[int]"
"""By the server: blocks copied to host memory, and whether the tier is complete; by the worker: the phase."""
Times = dict[tuple[str, int], list[float]]
"""Seconds by activity and number of blocks; for knocks, by phase and 0."""
Answer = TypeVar("Answer", BlocksLeased, PromptBlocks, MemoryKnock)


class Worker:
    """A worker that seals blocks without writing any data."""

    def __init__(self, path: Path, num_blocks: int, told: Told) -> None:
        self.client, self.num_blocks, self.told = MemoryClient(path, "worker", 1, is_decoding=True), num_blocks, told
        claim = self.client.claim_pool(LAYOUT, (num_blocks,))
        if claim.descriptor is not None:
            os.close(claim.descriptor)

    def run(self, sizes: list[int], num_rounds: int) -> Times:
        """Time each size `num_rounds` times, after an uncounted turn."""
        times: Times = defaultdict(list)
        self.turn(sizes[0])
        self.told[2] = Phase.PINNED
        _until(lambda: bool(self.told[1]))
        self.told[2] = Phase.IDLE
        time.sleep(1.0)
        for size in sizes:
            for _ in range(num_rounds):
                out_s, back_s = self.turn(size)
                times["out", size].append(out_s)
                times["back", size].append(back_s)
        self.told[2] = Phase.OVER
        return times

    def turn(self, size: int) -> tuple[float, float]:
        """Return the seconds until blocks are in host memory, and until restored."""
        keys = new_keys(size)
        leased, num_before = self._lease(size), self.told[0]
        self.told[2] = Phase.OUT
        sealed_s = time.perf_counter()
        self.client.send(BlocksSealed(leased.block_ids, leased.generations, keys))
        _until(lambda: self.told[0] >= num_before + size)
        out_s = time.perf_counter() - sealed_s
        self._free(leased)
        self._free(self._lease(self.num_blocks - 1))
        self.told[2] = Phase.BACK
        asked_s = time.perf_counter()
        self.client.send(PromptWanted("r", 0, keys, SLOW_US, (size,), 0))
        found = self._next(PromptBlocks)
        back_s = time.perf_counter() - asked_s
        if found.num_sealed != size:
            raise SystemExit(f"{found.num_sealed} of {size} blocks are there again")
        self._free(found)
        return out_s, back_s

    def _lease(self, count: int) -> BlocksLeased:
        self.client.send(BlocksWanted((count,)))
        return self._next(BlocksLeased)

    def _free(self, blocks: BlocksLeased | PromptBlocks) -> None:
        self.client.send(BlocksFreed(blocks.block_ids, blocks.generations))

    def _next(self, kind: type[Answer]) -> Answer:
        return _next(self.client, kind)


def run_worker(
    path: Path, num_blocks: int, sizes: list[int], num_rounds: int, told: Told, results: "Queue[Times]"
) -> None:
    """Run the sealing worker: the target of a process."""
    worker = Worker(path, num_blocks, told)
    results.put(worker.run(sizes, num_rounds))
    worker.client.close()


def run_knocker(path: Path, told: Told, results: "Queue[Times]") -> None:
    """Run the knocking worker: the target of a process that times answers by phase."""
    times: Times = defaultdict(list)
    with closing(MemoryClient(path, "knocker", 1, is_decoding=False)) as client:
        while (phase := Phase(told[2])) is not Phase.OVER:
            asked_s = time.perf_counter()
            client.send(MemoryKnock())
            _next(client, MemoryKnock)
            times[phase.name.lower(), 0].append(time.perf_counter() - asked_s)
            time.sleep(PAUSE_S)
    results.put(times)


def _next(client: MemoryClient, kind: type[Answer]) -> Answer:
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        select.select([client.connection], [], [], 1.0)
        for message in client.receive(BlocksLeased, PromptBlocks, PoolShortage, MemoryKnock):
            if isinstance(message, kind):
                return message
    raise SystemExit(f"no {kind.__name__} within {DEADLINE_S:g} s")


def _until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end_s:
            raise SystemExit(f"not within {DEADLINE_S:g} s")
        time.sleep(PAUSE_S / 10)


class Rig:
    """A server in this process, and two worker processes.

    Args:
        section: settings of the server.
    """

    def __init__(
        self, directory: Path, section: MemorySection, num_blocks: int, sizes: list[int], num_rounds: int
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.told: Told = spawn.Array("q", 3)
        self.results: Queue[Times] = spawn.Queue()
        path, device = directory / "memory.sock", section.device
        backing = HostBacking() if device == "cpu" else CudaBacking(int(device.partition(":")[2]))
        ready = MemoryReady("memory", 1, os.getpid(), VERSION, backing.device)
        self.announcer = Announcer(NetSection(router_endpoint=f"ipc://{directory}/router"), ready)  # without a router
        self.server = MemoryServer(path, backing, self.announcer, section)
        self.processes = [
            spawn.Process(target=run_worker, args=(path, num_blocks, sizes, num_rounds, self.told, self.results)),
            spawn.Process(target=run_knocker, args=(path, self.told, self.results)),
        ]
        self.times: Times = {}
        self.num_told = 0
        self.begun_s = self.made_s = 0.0  # the first piece of host memory, and the last

    def run(self) -> None:
        """Serve until both processes have sent their times; raises SystemExit if a process fails."""
        for process in self.processes:
            process.start()
        self.server.run(self._look)
        for process in self.processes:
            process.join()
        if self.num_told < len(self.processes):
            raise SystemExit("a process has failed")

    def close(self) -> None:
        self.server.close()
        self.announcer.close()

    def _look(self) -> None:
        tier = self.server.pools.tier
        assert tier is not None, "the device copies"
        self.told[0], self.told[1] = tier.traffic.out_bytes // BLOCK_BYTES, tier.room.is_made
        if tier.room.pieces and not self.begun_s:
            self.begun_s = time.monotonic()
        if tier.room.is_made and not self.made_s:
            self.made_s = time.monotonic()
        while not self.results.empty():
            self.times.update(self.results.get())
            self.num_told += 1
        if self.num_told == len(self.processes) or any(process.exitcode for process in self.processes):
            self.server.stop()


def tables(rig: Rig) -> list[Table]:
    """Return the measurements as tables."""
    copies = Table("what", "blocks", "p50", "GB/s", title="one text")
    answers = Table("meanwhile", "p50", "p99", "longest", title="an answer to another worker")
    for (what, size), times_s in rig.times.items():
        ordered = sorted(times_s)
        p50_s, p99_s = percentile(ordered, 50), percentile(ordered, 99)
        if size:
            copies.add_row(what, str(size), f"{p50_s * 1e3:.1f} ms", f"{size * BLOCK_BYTES / p50_s / 1e9:.1f}")
        else:
            answers.add_row(what, *(f"{seconds * 1e3:.2f} ms" for seconds in (p50_s, p99_s, ordered[-1])))
    room = rig.server.pools.tier.room if rig.server.pools.tier else None
    num_gb = room.num_pieces * room.piece_bytes / 1e9 if room else 0.0
    copies.caption = f"{num_gb:.1f} GB of host memory were there after {rig.made_s - rig.begun_s:.1f} s"
    return [copies, answers]


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_tier", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N (default: %(default)s)")
    parser.add_argument("--tier-gb", type=float, default=8.0, help="of host memory (default: %(default)g)")
    parser.add_argument("--pool-blocks", type=int, default=2048, help="of 2.36 MB each (default: %(default)s)")
    parser.add_argument("--sizes", type=numbers, default=[64, 256, 1000], help="blocks of texts (default: 64,256,1000)")
    parser.add_argument("--rounds", type=int, default=5, help="of each size (default: %(default)s)")
    args = parser.parse_args(argv)
    if max(args.sizes) >= args.pool_blocks:
        parser.error(f"--sizes {max(args.sizes)}: below --pool-blocks, which is {args.pool_blocks}")
    section = MemorySection(device=args.device, host_tier_bytes=int(args.tier_gb * 1e9))
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        with closing(Rig(Path(directory), section, args.pool_blocks, args.sizes, args.rounds)) as rig:
            rig.run()
        Console().print(*tables(rig))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
