"""Choice of the pair of workers for a simulated request.

The rules of `worker_pool` and `costs` in `router/placement` hold for a single client; nothing is taken from decode
workers. The rules stand here again because the router's own classes compare all pairs. With four hosts of eight GPUs a
simulation with these classes takes 3 times as long, with sixteen hosts 7 times. The simulation goes host by host, while
a host could have a better pair. A test compares the choice with the real router's choice.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from common.settings.config import RouterSection
from deploy.planning.simulation.decode import DecodeWorker
from deploy.planning.simulation.prefill import PrefillWorker
from deploy.planning.simulation.request import Request
from router.placement.route import FORESEEN_TOKENS, LOAD_TOKENS, MOVED_AT_ONCE

PREFILL_WINDOW = RouterSection().prefill_window
"""Prompt tokens sent ahead, in steps."""
AVOIDED_TOKENS = 1e12
"""Cost of a decode worker that has given the prompt back, so any other is better."""
Pair = tuple[PrefillWorker, DecodeWorker]
Floor = tuple[float, int]
"""Least cost of a pair of a host, and the last turn of the pair's decode worker."""

NOWHERE: Floor = (float("inf"), 0)
Key = tuple[float, int, int]
NOWHERE_KEY: Key = (float("inf"), 0, 0)


@dataclass(slots=True, eq=False)
class Host:
    """Workers of a host."""

    prefills: list[PrefillWorker]
    decodes: list[DecodeWorker]


class Pairing:
    """Pairs of workers within hosts, with the least cost in each host."""

    def __init__(self, hosts: list[Host]) -> None:
        self._hosts = hosts
        self._floors: list[Floor] = [(0.0, 0)] * len(hosts)  # for requests by turn
        self._floors_ahead: list[Floor] = [(0.0, 0)] * len(hosts)  # for overtaking requests
        self._place = {id(worker): place for place, host in enumerate(hosts)
                       for worker in (*host.prefills, *host.decodes)}  # fmt: skip
        self._is_shared = any(worker.gpu.is_shared for host in hosts for worker in host.prefills)

    def choose(self, request: Request, *, overtakes: bool = False) -> Pair | None:
        """Return the pair with room at the least cost, if any."""
        floors = self._floors_ahead if overtakes else self._floors
        least_moved = 0 if self._is_shared else request.num_own / MOVED_AT_ONCE
        best = NOWHERE_KEY
        chosen: Pair | None = None
        tried: list[tuple[int, Floor]] = []
        while (floor := min(floors)) < NOWHERE and floor[0] + least_moved < best[0]:
            place = floors.index(floor)
            for key, pair in _pairs_of(self._hosts[place], request, overtakes=overtakes):
                if key < best:
                    best, chosen = key, pair
            tried.append((place, floor))
            floors[place] = NOWHERE
        for place, floor in tried:
            floors[place] = floor
        return chosen

    def review(self, worker: PrefillWorker | DecodeWorker) -> None:
        """Update the floors of a worker's host."""
        place = self._place[id(worker)]
        host = self._hosts[place]
        least, last_turn = min((load(decode), decode.last_turn) for decode in host.decodes)
        waiting = [prefill.outstanding_tokens for prefill in host.prefills]
        by_turn = [prefill.outstanding_tokens for prefill in host.prefills if has_window(prefill)]
        self._floors_ahead[place] = (min(waiting) + LOAD_TOKENS * least, last_turn)
        self._floors[place] = (min(by_turn) + LOAD_TOKENS * least, last_turn) if by_turn else NOWHERE


def expected(request: Request) -> int:
    """Return the expected tokens of a request at the end."""
    return request.num_inputs + min(request.num_outputs, FORESEEN_TOKENS)


def _pairs_of(host: Host, request: Request, *, overtakes: bool) -> Iterator[tuple[Key, Pair]]:
    """Yield pairs of a host with room, and costs of the request there except computing on any GPU."""
    loads = [(LOAD_TOKENS * load(decode), decode) for decode in host.decodes]
    for prefill in host.prefills:
        if fits_ahead(prefill, request) if overtakes else has_window(prefill):
            for weight, decode in loads:
                moved = 0 if prefill.gpu is decode.gpu else request.num_own + lacking(decode, request)
                cost = prefill.outstanding_tokens + lacking(prefill, request) + moved / MOVED_AT_ONCE + weight
                cost += AVOIDED_TOKENS * (decode is request.avoided)
                yield (cost, decode.last_turn, prefill.last_turn), (prefill, decode)


def lacking(worker: PrefillWorker | DecodeWorker, request: Request) -> int:
    """Return the tokens of the prefix, if not known to be in the worker's pool."""
    prefix = request.prefix
    return 0 if prefix is None or prefix in worker.gpu.pool.known else prefix.num_tokens


def load(decode: DecodeWorker) -> float:
    """Return the load of a decode worker: the fuller of rows and blocks; 1 is full."""
    return max(decode.num_assigned / decode.costs.max_rows, decode.expected_tokens / decode.gpu.pool.num_tokens)


def has_window(prefill: PrefillWorker) -> bool:
    """Tell whether a prefill worker takes prompts by turn."""
    by_turn = prefill.outstanding_tokens - sum(prefill.overtaking)
    return by_turn < PREFILL_WINDOW * prefill.costs.step_tokens


def fits_ahead(prefill: PrefillWorker, request: Request) -> bool:
    """Tell whether a prompt may be sent to a prefill worker ahead of its turn."""
    is_shorter = request.num_inputs * prefill.num_outstanding < prefill.outstanding_tokens
    before = prefill.overtaking[: bisect_right(prefill.overtaking, request.num_inputs)]
    return is_shorter and sum(before) < prefill.costs.step_tokens
