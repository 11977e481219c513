"""A discrete-event simulation of a router, prefill workers, handoffs and decode workers.

    request ──▶ router: queue, window, choice ──▶ prefill worker: steps of a token budget ──▶ handoff ──▶ decode worker.

Simulated are:

- The order of prompts (the workers' own code), the router's window and choice of pairs.
- Chunks, two prompt steps in flight, rows, KV blocks, and joins of decode steps.
- Mutual slowdown of steps on a shared GPU.
- Prefixes in each pool, being computed or evicted, and savings of decode steps by shared prefixes.

Left out are:

- Stop tokens, conversations, preemption, deaths, several clients, and limits of the queue.
- Cached blocks of a prompt given back at a standstill, and prefixes from host memory or other pools.
- The time of messages and of busy processes.

Equal loads give equal figures.
"""

import random
from dataclasses import dataclass

from common.base.errors import BatonError, ConfigError
from common.settings.config import RouterSection
from common.wire.messages.worker import Role
from deploy.planning.simulation.decode import DecodeWorker
from deploy.planning.simulation.events import Events
from deploy.planning.simulation.gpu import Gpu
from deploy.planning.simulation.layout import Layout
from deploy.planning.simulation.loads import Arrival, Load
from deploy.planning.simulation.pairing import Host
from deploy.planning.simulation.pool import Pool
from deploy.planning.simulation.prefill import DECODE_RESERVE, PrefillWorker
from deploy.planning.simulation.request import Request
from deploy.planning.simulation.routing import Router
from deploy.planning.step_times.costs import Costs

REQUEST_TIMEOUT_MS = RouterSection().request_timeout_s * 1e3
"""Limit of a request."""


class Stuck(BatonError):
    """A request given back until its timeout, because prompts fill two pools and wait for each other's blocks."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a simulation; times in milliseconds."""

    requests: list[Request]  # evaluated requests, all finished
    gaps: list[tuple[float, int]]  # of all requests, except first gaps: ms, count
    num_tokens: int  # outputs of requests that ended within `span_ms`
    span_ms: float  # evaluated time; by default from first arrival to last end
    most_at_once: int  # requests in flight or queued


class Simulation:
    """A system under a load.

    Args:
        kv_tokens: size of a GPU's pool; 0: all available memory.
    """

    def __init__(self, layout: Layout, costs: Costs, load: Load, *, kv_tokens: int = 0) -> None:
        self._costs, self._load, self._events, self._longest = costs, load, Events(), load.longest
        self._chance = random.Random(0).random
        self._hosts = [self._host(layout, number, kv_tokens) for number in range(layout.num_hosts)]
        rates = costs.rates
        self._request_ms = (rates.shared if layout.is_shared else rates.apart).request_ms
        self._router = Router(self._hosts)
        self._left = list(reversed(load.arrivals)) if load.num_streams else []
        self._requests: list[Request] = []
        self._num_active = self._most_active = 0

    def run(self) -> Outcome:
        """Run to the end; raises Stuck if a request exceeds its timeout."""
        first = self._load.arrivals if not self._load.num_streams else self._next_ones(self._load.num_streams)
        for arrival in first:
            self._arrive(arrival, arrival.time_ms)
        self._events.run()
        assert all(request.ended_ms >= 0 for request in self._requests), "nothing happens any more"
        load = self._load
        seen = [each for each in self._requests if load.first_ms <= each.arrived_ms <= load.last_ms]
        gaps = [gap for host in self._hosts for decode in host.decodes for gap in decode.gaps]
        begin_ms = max(load.first_ms, min(each.arrived_ms for each in self._requests))
        end_ms = min(load.last_ms, max(each.ended_ms for each in self._requests))
        num_tokens = sum(each.num_outputs for each in self._requests if begin_ms <= each.ended_ms <= end_ms)
        return Outcome(seen, gaps, num_tokens, end_ms - begin_ms, self._most_active)

    def _host(self, layout: Layout, number: int, kv_tokens: int) -> Host:
        places = {role: layout.places(role) for role in Role}
        gpus = []
        for index in range(layout.num_gpus):
            num_workers = (places[role].count(index) for role in (Role.PREFILL, Role.DECODE))
            num_tokens = kv_tokens or self._costs.room.kv_tokens(*num_workers)
            if self._longest > num_tokens * (1 - DECODE_RESERVE):
                raise ConfigError(
                    f"a request of {self._longest} tokens: a GPU has room for {num_tokens} tokens of KV "
                    "beside the weights; shorten it, or take GPUs with more memory"
                )
            gpus.append(Gpu(number, self._costs, self._pool(num_tokens, index, layout.num_gpus)))
        decodes = [
            DecodeWorker(gpus[i], self._costs, self._events, self._end, self._return, self._chance)
            for i in places[Role.DECODE]
        ]
        prefills = [
            PrefillWorker(gpus[i], self._costs, self._events, self._found, self._first) for i in places[Role.PREFILL]
        ]
        return Host(prefills, decodes)

    def _pool(self, num_tokens: int, index: int, count: int) -> Pool:
        """Return the pool of a GPU with known prefixes; without room for all, each GPU gets others."""
        pool, known = Pool(num_tokens), self._load.known
        first = index * len(known) // count
        for prefix in (*known[first:], *known[:first]):
            pool.keep(prefix)
        return pool

    def _next_ones(self, count: int) -> list[Arrival]:
        return [self._left.pop() for _ in range(min(count, len(self._left)))]

    def _arrive(self, arrival: Arrival, time_ms: float) -> None:
        lengths = arrival.num_inputs, arrival.num_outputs, arrival.num_cached
        request = Request(len(self._requests), time_ms, *lengths, prefix=arrival.prefix)
        self._requests.append(request)
        found_ms = self._costs.found_ms(request.num_inputs - request.num_own)
        self._events.at(time_ms + self._request_ms + found_ms, lambda: self._submit(request))

    def _submit(self, request: Request) -> None:
        self._num_active += 1
        self._most_active = max(self._most_active, self._num_active)
        self._router.submit(request)

    def _found(self, request: Request) -> None:
        """Update the router after a prefix was found."""
        self._router.lighten(request)
        self._router.pump()

    def _first(self, request: Request) -> None:
        """Note the first token of a completed prompt, and offer the prompt to its decode worker."""
        if not request.num_returns:
            request.first_ms = self._events.now_ms
        prefill, decode = self._router.pair_of(request)
        self._router.prompt_is_over(request)
        if request.num_outputs > 1:
            decode.offer(request, prefill.gpu)
        else:
            request.ended_ms = self._events.now_ms
            prefill.gpu.give_back(request, prefill.gpu.held_by(request))
            self._end(request)
        self._router.pump()

    def _return(self, request: Request) -> None:
        """Queue a request again after a decode worker gave the request back."""
        if self._events.now_ms - request.arrived_ms > REQUEST_TIMEOUT_MS:
            raise Stuck(
                f"a request is not over after {REQUEST_TIMEOUT_MS / 1e3:.0f} s, as requests wait for one another's KV "
                f"blocks: pools of {self._hosts[0].prefills[0].gpu.pool.num_tokens} tokens are too small"
            )
        self._router.reenter(request)

    def _end(self, request: Request) -> None:
        """Note the last token of a request."""
        self._num_active -= 1
        self._router.is_over(request)
        for arrival in self._next_ones(1):
            self._arrive(arrival, self._events.now_ms)
        self._router.pump()


def simulate(layout: Layout, costs: Costs, load: Load, *, kv_tokens: int = 0) -> Outcome:
    """Return the outcome of a load on a system."""
    return Simulation(layout, costs, load, kv_tokens=kv_tokens).run()
