"""Prefix-cache requests to a memory server by a single worker: matches, and seals until found."""

import os
import select
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.table import Table

from common.base.percentiles import percentile
from common.memory.client.client import MemoryClient
from common.wire.messages.memory import (
    BlocksFreed,
    BlocksLeased,
    BlocksSealed,
    BlocksWanted,
    MemoryMessage,
    PromptBlocks,
    PromptWanted,
)
from common.wire.values.fields import KEY_BYTES
from common.wire.values.kv_layout import KVLayout

ANSWER_S = 30.0
Answer = TypeVar("Answer", BlocksLeased, PromptBlocks)


@dataclass(frozen=True, slots=True)
class Case:
    """Turns of a kind: seconds of each, messages in all, and the server's processor time."""

    name: str
    times_s: list[float]
    num_messages: int
    duration_s: float
    server_s: float

    def cells(self) -> list[str]:
        times_s = sorted(self.times_s)
        return [
            self.name,
            *(f"{percentile(times_s, percent) * 1e3:.2f} ms" for percent in (50, 99)),
            f"{self.num_messages / self.duration_s:,.0f}",
            f"{self.server_s / len(self.times_s) * 1e3:.2f} ms",
        ]


class Reader:
    """A worker that only finds and seals blocks."""

    def __init__(self, path: Path, layout: KVLayout, num_blocks: int) -> None:
        self._client = MemoryClient(path, "reader", 1, is_decoding=True)
        descriptor = self._client.claim_pool(layout, (num_blocks,)).descriptor
        assert descriptor is not None, "a pool in host memory"
        os.close(descriptor)
        self.num_messages = 0  # both ways

    def match(self, keys: bytes, num_there: int) -> float:
        """Find a text's blocks, expecting `num_there`, and give the blocks back; return the seconds of the find."""
        self._catch_up()
        asked_s = time.perf_counter()
        found = self._find(keys)
        took_s = time.perf_counter() - asked_s
        self._send(BlocksFreed(found.block_ids, found.generations))
        if found.num_sealed != num_there:
            raise SystemExit(f"{found.num_sealed} blocks were found, {num_there} are there")
        return took_s

    def seal(self, keys: bytes) -> float:
        """Seal new blocks under `keys`, and give the blocks back; return the seconds until the seal is visible."""
        self._send(BlocksWanted((len(keys) // KEY_BYTES,)))
        leased = self._next(BlocksLeased)
        self._catch_up()
        sealed_s = time.perf_counter()
        self._send(BlocksSealed(leased.block_ids, leased.generations, keys))
        found = self._find(keys[:KEY_BYTES])
        took_s = time.perf_counter() - sealed_s
        if not found.num_sealed:
            raise SystemExit("a block that was sealed is not found")
        for blocks in (leased, found):
            self._send(BlocksFreed(blocks.block_ids, blocks.generations))
        return took_s

    def close(self) -> None:
        self._client.close()

    def _catch_up(self) -> None:
        """Wait until the server has handled all earlier messages, to keep earlier work out of the timing."""
        found = self._find(new_keys(1))
        self._send(BlocksFreed(found.block_ids, found.generations))

    def _find(self, keys: bytes) -> PromptBlocks:
        self._send(PromptWanted("r", 0, keys, 0, (len(keys) // KEY_BYTES,), 0))
        return self._next(PromptBlocks)

    def _send(self, message: MemoryMessage) -> None:
        self.num_messages += 1
        self._client.send(message)

    def _next(self, kind: type[Answer]) -> Answer:
        end_s = time.monotonic() + ANSWER_S
        while (left_s := end_s - time.monotonic()) > 0:
            select.select([self._client.connection], [], [], left_s)
            for message in self._client.receive(BlocksLeased, PromptBlocks):
                self.num_messages += 1
                if isinstance(message, kind):
                    return message
        raise SystemExit(f"no {kind.__name__} within {ANSWER_S:g} s")


def run_cases(reader: Reader, duration_s: float, server_cpu_s: Callable[[], float]) -> list[Case]:
    """Run each case for `duration_s`; `server_cpu_s` returns the server's processor time."""
    short, long = new_keys(64), new_keys(1000)
    for keys in (short, long):
        reader.seal(keys)
    turns: dict[str, Callable[[], float]] = {
        "match of 64": lambda: reader.match(short, 64),
        "match of 1,000": lambda: reader.match(long, 1000),
        "match of 1,000 unknown": lambda: reader.match(new_keys(1000), 0),
        "seal of 64": lambda: reader.seal(new_keys(64)),
        "seal of 64 known": lambda: reader.seal(short),
    }
    return [_case(reader, name, turn, duration_s, server_cpu_s) for name, turn in turns.items()]


def _case(
    reader: Reader, name: str, turn: Callable[[], float], duration_s: float, server_cpu_s: Callable[[], float]
) -> Case:
    times_s, num_messages, used_s, begin_s = [], reader.num_messages, server_cpu_s(), time.perf_counter()
    while time.perf_counter() < begin_s + duration_s:
        times_s.append(turn())
    took_s = time.perf_counter() - begin_s
    return Case(name, times_s, reader.num_messages - num_messages, took_s, server_cpu_s() - used_s)


def new_keys(count: int) -> bytes:
    """Make packed random keys, so no block has such a key."""
    return os.urandom(count * KEY_BYTES)


def measure_cases(
    path: Path, layout: KVLayout, num_blocks: int, duration_s: float, server_cpu_s: Callable[[], float]
) -> Table:
    """Run all cases against a server with a pool of `layout`, each for `duration_s`, and return a table."""
    table = Table("of blocks", "p50", "p99", "messages/s", "server a turn", title="one worker, nobody else")
    with closing(Reader(path, layout, num_blocks)) as reader:
        for case in run_cases(reader, duration_s, server_cpu_s):
            table.add_row(*case.cells())
    return table
