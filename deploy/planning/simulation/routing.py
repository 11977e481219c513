"""The router of a simulation: the queue, the window of prompts sent ahead, and the choice of pairs.

The rules of `choice` and `costs` in `router/placement`, and of `binding` and `waiting_queue` in `router/dispatch`,
hold for a single client. No request overtakes because of blocks elsewhere, and nothing is taken from decode workers. A
test compares the choice with the real router's choice. The router compares all pairs; the simulation goes host by host,
while a host could have a better pair.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from deploy.planning.simulation.decode import DecodeWorker
from deploy.planning.simulation.prefill import PrefillWorker
from deploy.planning.simulation.request import Request

PREFILL_WINDOW = 3.0
"""Prompt tokens sent ahead, in steps: `router.prefill_window`."""
BACKLOG_TOKENS = 32_768
"""Queued tokens a prompt GPU from which prompts take whole GPUs: `router.backlog_tokens`."""
FORESEEN_TOKENS, MOVED_AT_ONCE, LOAD_TOKENS = 1024, 4, 32_768
"""Constants of `router/placement/route.py`."""
AVOIDED_TOKENS = 1e12
"""Cost of a decode worker that has given the prompt back, so any other is better."""
MAX_TRIED = 8
"""Shortest queued prompts tried for overtaking."""
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


class Router:
    """A router and its queue of unassigned requests."""

    def __init__(self, hosts: list[Host]) -> None:
        self._hosts = hosts
        self._floors: list[Floor] = [(0.0, 0)] * len(hosts)  # for requests by turn
        self._floors_ahead: list[Floor] = [(0.0, 0)] * len(hosts)  # for overtaking requests
        self._place = {id(worker): place for place, host in enumerate(hosts)
                       for worker in (*host.prefills, *host.decodes)}  # fmt: skip
        self._is_shared = any(worker.gpu.is_shared for host in hosts for worker in host.prefills)
        self._num_prompt_gpus = sum(len(host.prefills) for host in hosts)
        self._pairs: dict[int, Pair] = {}  # by number of the request
        self._by_turn: deque[Request] = deque()
        self._by_length: list[tuple[int, int, Request]] = []
        self._num_tokens = self._num_turns = self._num_sent = 0

    def submit(self, request: Request) -> None:
        request.turn, self._num_turns = self._num_turns, self._num_turns + request.num_inputs
        self._by_turn.append(request)
        insort(self._by_length, (request.num_inputs, request.number, request))
        self._num_tokens += request.num_inputs
        self.pump()

    def reenter(self, request: Request) -> None:
        """Queue a request given back by a decode worker, at its old turn."""
        _, decode = self._pairs[request.number]
        self.is_over(request)
        request.begin_again(avoided=decode)
        self._by_turn.insert(bisect_left(self._by_turn, request.turn, key=lambda each: each.turn), request)
        insort(self._by_length, (request.num_inputs, request.number, request))
        self._num_tokens += request.num_inputs
        self.pump()

    def pair_of(self, request: Request) -> Pair:
        """Return the pair of a request in flight."""
        return self._pairs[request.number]

    def lighten(self, request: Request) -> None:
        """Subtract tokens found cached by the prefill worker."""
        prefill, _ = self._pairs[request.number]
        num_left = request.num_inputs - request.num_found
        prefill.outstanding_tokens -= request.num_sent - num_left
        if request.overtakes:
            prefill.overtaking.remove(request.num_sent)
            insort(prefill.overtaking, num_left)
        request.num_sent = num_left
        self._review(prefill)

    def prompt_is_over(self, request: Request) -> None:
        """Note the first token of a request."""
        prefill, _ = self._pairs[request.number]
        prefill.outstanding_tokens -= request.num_sent
        prefill.num_outstanding -= 1
        if request.overtakes:
            prefill.overtaking.remove(request.num_sent)
        self._review(prefill)

    def is_over(self, request: Request) -> None:
        """Note the last token of a request."""
        _, decode = self._pairs.pop(request.number)
        decode.num_assigned -= 1
        decode.expected_tokens -= expected(request)
        self._review(decode)

    def pump(self) -> None:
        """Send queued requests, first by turn and then ahead of turn, while a pair has room."""
        while self._by_turn and (pair := self.choose(self._by_turn[0])):
            self._send(self._by_turn[0], pair)
        while (found := self._ahead()) is not None:
            request, pair = found
            request.overtakes = True
            self._send(request, pair)

    def choose(self, request: Request, *, overtakes: bool = False) -> Pair | None:
        """Return the pair with room at the least cost, if any."""
        floors = self._floors_ahead if overtakes else self._floors
        least_moved = 0 if self._is_shared else request.num_own / MOVED_AT_ONCE
        best = NOWHERE_KEY
        chosen: Pair | None = None
        tried: list[tuple[int, Floor]] = []
        while (floor := min(floors)) < NOWHERE and floor[0] + least_moved < best[0]:
            place = floors.index(floor)
            for key, pair in self._pairs_of(self._hosts[place], request, overtakes=overtakes):
                if key < best:
                    best, chosen = key, pair
            tried.append((place, floor))
            floors[place] = NOWHERE
        for place, floor in tried:
            floors[place] = floor
        return chosen

    def _pairs_of(self, host: Host, request: Request, *, overtakes: bool) -> Iterator[tuple[Key, Pair]]:
        """Yield pairs of a host with room, and costs of the request there except computing on any GPU."""
        loads = [(LOAD_TOKENS * load(decode), decode) for decode in host.decodes]
        for prefill in host.prefills:
            if fits_ahead(prefill, request) if overtakes else has_window(prefill):
                for weight, decode in loads:
                    moved = 0 if prefill.gpu is decode.gpu else request.num_own + lacking(decode, request)
                    cost = prefill.outstanding_tokens + lacking(prefill, request) + moved / MOVED_AT_ONCE + weight
                    cost += AVOIDED_TOKENS * (decode is request.avoided)
                    yield (cost, decode.last_turn, prefill.last_turn), (prefill, decode)

    def _ahead(self) -> tuple[Request, Pair] | None:
        tried = {num_tokens: request for num_tokens, _, request in reversed(self._by_length[:MAX_TRIED])}
        for request in reversed(tried.values()):
            if (pair := self.choose(request, overtakes=True)) is not None:
                return request, pair
        return None

    def _send(self, request: Request, pair: Pair) -> None:
        self._discard(request)
        self.assign(request, pair)
        pair[0].take(request)
        if request.num_found:
            self.lighten(request)

    def assign(self, request: Request, pair: Pair) -> None:
        """Count a request as the pair's."""
        prefill, decode = self._pairs[request.number] = pair
        self._num_sent += 1
        prefill.last_turn = decode.last_turn = self._num_sent
        prefill.outstanding_tokens += request.num_inputs
        prefill.num_outstanding += 1
        request.num_sent = request.num_inputs
        if request.overtakes:
            insort(prefill.overtaking, request.num_sent)
        if request.prefix is not None:
            prefill.gpu.pool.known.add(request.prefix)
            decode.gpu.pool.known.add(request.prefix)
        decode.num_assigned += 1
        decode.expected_tokens += expected(request)
        neighbour = prefill.gpu.decode
        num_beside = neighbour.num_assigned if isinstance(neighbour, DecodeWorker) else 0
        is_backlog = self._num_tokens >= BACKLOG_TOKENS * self._num_prompt_gpus
        request.whole_gpu = is_backlog or num_beside == (neighbour is decode)
        self._review(prefill)

    def _discard(self, request: Request) -> None:
        """Remove a request from the queue."""
        if self._by_turn[0] is request:
            self._by_turn.popleft()
        else:
            self._by_turn.remove(request)
        del self._by_length[bisect_left(self._by_length, (request.num_inputs, request.number))]
        self._num_tokens -= request.num_inputs

    def _review(self, worker: PrefillWorker | DecodeWorker) -> None:
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
