"""Bounds of systems of many GPUs: the dispatcher's core, fronts, links between hosts, and the code's own limits.

    python -m benchmarks.scale --results rows.csv     # measure choices of a pair among many workers.
    python -m benchmarks.scale                        # show the table, from benchmarks/results.csv.

The table multiplies what was measured alone; no such system was run. Every GPU has a worker of each kind and its part
of the load, which a simulation of one host keeps. Processor times are those of `benchmarks.router_streams --fronts`,
and of choices measured here: the real code with made-up workers.
"""

import argparse
import random
import sys
import time
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables.cells import Cell, Line, TableData, results
from benchmarks.tables.layout import render
from common.base.errors import BatonError
from common.memory.base.slots import NUM_SLOTS, SLOT_BYTES
from common.memory.gates.gate import MAX_VISITS
from common.settings.config import NetSection, RouterSection
from common.wire.messages.memory_reports import BlockEvent
from common.wire.messages.operator import MAX_WORKERS
from common.wire.messages.worker import Role
from common.wire.values.kv_layout import CacheKind, KVGroup, KVLayout
from deploy.bench.origin import hardware
from deploy.bench.results import Row, append_rows, row_of
from deploy.bench.stats import Figure
from deploy.planning.simulation.layout import Layout
from deploy.planning.simulation.outcome import Objectives
from deploy.planning.simulation.simulator import simulate
from deploy.planning.step_times.costs import Costs
from deploy.planning.step_times.rates import read_rates
from deploy.planning.workload import Span, Steady
from router.placement.choice import choose
from router.placement.member import Speeds
from router.placement.route import Demand, Route
from router.placement.text_keys import TextKeys
from router.placement.worker_pool import WorkerPool
from tests.support.messages import kv_path, worker_ready

SIZES = ((8, 1), (64, 8), (512, 64))
"""GPUs and hosts."""
INPUTS, OUTPUTS, RATE = 1024, 128, 30.0
"""Tokens of a request, and requests a second for each GPU."""
KEPT = Objectives(ttft_ms=400.0, tpot_ms=20.0)
"""Limits that the simulated host has to keep."""
RATES = "h200-qwen3-4b"
BLOCK_SIZE, NUM_CACHED = 16, 256
"""Tokens of a block, and of a beginning that all pools have."""
IN_HOST, BETWEEN = 256.0, 8.0
"""GB/s of paths, made up."""
STREAMS = "router, 256 prompts of 128 tokens, 256 streams at 20 ms, 2 fronts"
NUM_CHOICES, ROUNDS, NUM_SENT = 10, 100, 8


def pool_of(num_gpus: int, num_hosts: int) -> WorkerPool:
    """Make a router's view of the workers: a worker of each kind on each GPU, with paths and some work."""
    rng, layout = random.Random(0), KVLayout("m", (KVGroup(CacheKind.FULL, 36, 8, 128, BLOCK_SIZE, 0, "bfloat16"),))
    pool = WorkerPool(NetSection(), RouterSection().prefill_window)
    for role in (Role.PREFILL, Role.DECODE):
        for gpu in range(num_gpus):
            is_prefill = role is Role.PREFILL
            ready = worker_ready(
                f"{role.label}-{gpu}", role, kv_layout=layout, num_blocks=(40_000,), max_model_len=40_960,
                max_num_seqs=256, max_batch_tokens=8192 if is_prefill else 0, memory_server_id=f"m{gpu}",
                memory_server_epoch=1, pool_id=1, takes_replies=is_prefill, prefix_min_tokens=256,
            )  # fmt: skip
            member = pool.add(ready, 0.0)
            member.speeds = Speeds(block_us=208)
            member.work.outstanding_tokens = rng.randrange(8192) if is_prefill else 0
            member.work.num_assigned = 0 if is_prefill else rng.randrange(64)
    for prefill in range(num_gpus):
        for decode in range(num_gpus):
            is_near = prefill * num_hosts // num_gpus == decode * num_hosts // num_gpus
            rate = 0.0 if prefill == decode else IN_HOST if is_near else BETWEEN
            pool.set_path(kv_path(f"prefill-{prefill}", f"decode-{decode}", gb_per_s=rate))
    for gpu in range(num_gpus):
        contents = pool.prefixes.contents((f"m{gpu}", 1))
        contents.begin()
        contents.apply(BlockEvent.SEALED, range(NUM_CACHED // BLOCK_SIZE))
    return pool


def demand_of(pool: WorkerPool) -> Demand:
    """Make the demand of a request whose beginning all pools have."""
    text = TextKeys(next(iter(pool)).ready.kv_layout, b"", array("Q", range(INPUTS // BLOCK_SIZE)))
    return Demand(INPUTS, INPUTS + OUTPUTS, texts=(text,))


def choice_ms(num_gpus: int, num_hosts: int) -> float:
    """Return the time of a choice and of the counts of a sequence, from its begin to its end.

    It is the least of some rounds: other programs cause any excess.
    """
    pool = pool_of(num_gpus, num_hosts)
    demand, sent = demand_of(pool), deque[Route]()
    times_s = []
    for _ in range(ROUNDS):
        begin_s = time.perf_counter()
        for _ in range(NUM_CHOICES):
            if (route := choose(pool, demand)) is None:
                raise BatonError("no pair has room")
            pool.ledger.assign(route, INPUTS)
            sent.append(route)
            if len(sent) > NUM_SENT:
                _end(pool, sent.popleft())
        times_s.append((time.perf_counter() - begin_s) / NUM_CHOICES)
    return min(times_s) * 1e3


def _end(pool: WorkerPool, route: Route) -> None:
    pool.ledger.reduce_prompt(route, INPUTS, INPUTS - NUM_CACHED)
    pool.ledger.release_prompt(route, INPUTS - NUM_CACHED)
    pool.ledger.prove(route)
    pool.ledger.release(route)


def table(rows: Sequence[Row]) -> TableData:
    """Make a line for each size; raises BatonError if the host does not keep its load."""
    costs, (num_gpus, _) = Costs(read_rates(RATES)), SIZES[0]
    steady = Steady(RATE * num_gpus, Span(INPUTS, INPUTS), Span(OUTPUTS, OUTPUTS))
    outcome = simulate(Layout(num_gpus, num_gpus, num_gpus), costs, steady.load(OUTPUTS * KEPT.tpot_ms / 1e3, 99.0))
    if (kept := outcome.attainment(KEPT)) < KEPT.percent:
        raise BatonError(f"a host of {num_gpus} GPUs keeps its limits for {kept:.1f} % of {RATE:g} requests/s a GPU")
    lines: list[Line] = []
    told = {name: _newest(rows, STREAMS, name) for name in ("loop_per_1000_tokens", "front_loop_per_1000_tokens")}
    of_loop, of_front = told.values()
    for gpus, hosts in SIZES:
        of_choice = _newest(rows, _label(gpus, hosts), "choice")
        if of_loop is None or of_front is None or of_choice is None:
            continue
        requests = RATE * gpus
        tokens = requests * OUTPUTS
        moved = requests * costs.rates.shape.context_bytes(INPUTS) / 1e9
        num_visits = 2 * (gpus - gpus // hosts)  # of decode workers for prompts, of prefill workers for replies
        values = {
            of_loop: (requests, tokens, 100 * tokens * of_loop.value / 1e6),
            of_choice: (of_choice.value, requests * of_choice.value / 10),
            of_front: (tokens * of_front.value / 1e6,),
        }
        cells = [Cell(row, value) for row, some in values.items() for value in some]
        pinned = 2 * num_visits * gpus // hosts * NUM_SLOTS * SLOT_BYTES / 1e9
        cells += [Cell(of_choice, value) for value in (moved / hosts, 2 * gpus, num_visits, pinned)]
        lines.append((_label(gpus, hosts), list[Cell | None](cells)))
    columns = [
        "requests/s", "output tokens/s", "dispatcher: tokens, % of a core", "a choice of workers, ms",
        "dispatcher: choices, % of a core", "cores of fronts", "sent by a host if all prompts travel, GB/s",
        f"workers, of {MAX_WORKERS}", f"visits of a gate, of {MAX_VISITS}", "pinned for visits by a host, GB",
    ]  # fmt: skip
    subject = (
        f"{RATE:g} requests/s of {INPUTS:,}/{OUTPUTS} tokens for each GPU, as a simulated host of 8 keeps; all else is "
        "multiplied from figures on two cores, no such system was run"
    )
    return TableData(subject, "system", columns, lines)


def _newest(rows: Sequence[Row], workload: str, figure: str) -> Row | None:
    return next((row for row in reversed(rows) if (row.workload, row.figure) == (workload, figure)), None)


def _label(num_gpus: int, num_hosts: int) -> str:
    return f"{num_gpus} GPUs on {num_hosts} host{'s' * (num_hosts > 1)}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, help="measure choices, and append a row a size to this file")
    args = parser.parse_args(argv)
    if args.results is None:
        print(render(table(results())))
        return 0
    for size in SIZES:
        figure = Figure("choice", choice_ms(*size), "ms")
        print(_label(*size), f"{figure.value:.2f} ms")
        append_rows(args.results, [row_of(hardware(), "qwen3-4b", _label(*size), figure)])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
