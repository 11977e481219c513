"""A discrete-event simulation of a router, prefill workers, handoffs and decode workers.

    request ──▶ router: queue, window, choice ──▶ prefill worker: steps of a token budget ──▶ handoff ──▶ decode worker

What it knows: the order of prompts (the workers' own code), how much the router sends ahead and which pair it chooses,
chunks, two prompt steps in flight, rows, KV blocks, who joins which decode step, how steps that share a GPU slow each
other down, which prefixes are in which pool, being computed there or gone for want of room, and what a decode step is
spared of one that its rows share. What it leaves out: stop tokens, conversations, what of a prompt is found again when
it is given back at a standstill, host memory and other pools that a prefix could come from, preemption, deaths, several
clients, limits of the queue, and what messages and busy processes take. The same load gives the same figures.
"""

import random
from dataclasses import dataclass

from common.base.errors import BatonError, ConfigError
from common.wire.messages.worker import Role
from deploy.planning.simulation.decode import DecodeWorker
from deploy.planning.simulation.events import Events
from deploy.planning.simulation.gpu import Gpu
from deploy.planning.simulation.layout import Layout
from deploy.planning.simulation.loads import Arrival, Load
from deploy.planning.simulation.pool import Pool
from deploy.planning.simulation.prefill import DECODE_RESERVE, PrefillWorker
from deploy.planning.simulation.request import Request
from deploy.planning.simulation.routing import Host, Router
from deploy.planning.step_times.costs import Costs

REQUEST_TIMEOUT_MS = 600_000.0
"""`router.request_timeout_s`."""


class Stuck(BatonError):
    """Prompts fill two pools, each for who decodes in the other, and a request is given back until its time is over."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation showed; times in milliseconds."""

    requests: list[Request]  # that are looked at, all over
    gaps: list[tuple[float, int]]  # of all requests, between two tokens but the first two: how long, how many
    num_tokens: int  # outputs of requests that ended within `span_ms`
    span_ms: float  # that is looked at; of a load without such a time, from the first arrival to the last end
    most_at_once: int  # requests in flight or queued
    num_events: int


class Simulation:
    """One system and one load.

    Args:
        kv_tokens: of the pool of a GPU; 0: what there is room for.
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
        """Until all is over; raises Stuck if something takes longer than requests may."""
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
        return Outcome(seen, gaps, num_tokens, end_ms - begin_ms, self._most_active, self._events.num_done)

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
        """That of one GPU of so many: where there is no room for all that is known, each has others."""
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
        """Its prefix is there since it was sent."""
        self._router.lighten(request)
        self._router.pump()

    def _first(self, request: Request) -> None:
        """Its prompt is computed, and its first token is there."""
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
        """It was given back at a standstill."""
        if self._events.now_ms - request.arrived_ms > REQUEST_TIMEOUT_MS:
            raise Stuck(
                f"a request is not over after {REQUEST_TIMEOUT_MS / 1e3:.0f} s, as requests wait for one another's KV "
                f"blocks: pools of {self._hosts[0].prefills[0].gpu.pool.num_tokens} tokens are too small"
            )
        self._router.reenter(request)

    def _end(self, request: Request) -> None:
        """Its last token is there."""
        self._num_active -= 1
        self._router.is_over(request)
        for arrival in self._next_ones(1):
            self._arrive(arrival, self._events.now_ms)
        self._router.pump()


def simulate(layout: Layout, costs: Costs, load: Load, *, kv_tokens: int = 0) -> Outcome:
    """What that load would see of that system."""
    return Simulation(layout, costs, load, kv_tokens=kv_tokens).run()
