"""A discrete-event simulation of a router, prefill workers, handoffs and decode workers.

    request ──▶ router: queue, window, choice ──▶ prefill worker: steps of a token budget ──▶ handoff ──▶ decode worker.

The queue, the choice of workers and the order of prompts are the programs' own code. Simulated are chunks, two prompt
steps in flight, rows, KV blocks, joins of decode steps, prefixes in each pool, and slowdown on shared GPUs. Between
hosts each has a link.

Left out are:

- Stop tokens, conversations, preemption, deaths, and limits of the queue.
- Prefixes from host memory or other pools.
- Handoffs given back because prompts of two pools wait for each other's blocks: such a system counts as stuck.
- The time of messages and of busy processes.

Equal loads give equal figures.
"""

from collections import Counter

from common.base.errors import BatonError, ConfigError
from common.settings.slo_section import SloSection
from common.wire.messages.worker import Role
from deploy.planning.simulation.decode import DecodeWorker
from deploy.planning.simulation.events import Events
from deploy.planning.simulation.gpu import Gpu
from deploy.planning.simulation.layout import Layout
from deploy.planning.simulation.loads import Load
from deploy.planning.simulation.outcome import Outcome
from deploy.planning.simulation.pool import Pool
from deploy.planning.simulation.prefill import DECODE_RESERVE, PrefillWorker
from deploy.planning.simulation.request import EqualTerms, Request
from deploy.planning.simulation.router import Router
from deploy.planning.simulation.wires import Wires
from deploy.planning.step_times.costs import Costs


class Stuck(BatonError):
    """Prompts fill two pools and wait for each other's blocks."""


USUAL = SloSection()
"""Targets of workers without other settings."""


class Simulation:
    """A system under a load.

    Args:
        kv_tokens: size of a GPU's pool; 0: all available memory.
        targets: of shared GPUs.
        gb_per_s: rate between two hosts.
    """

    def __init__(
        self,
        layout: Layout,
        costs: Costs,
        load: Load,
        *,
        kv_tokens: int = 0,
        targets: SloSection = USUAL,
        gb_per_s: float = 0.0,
    ) -> None:
        self._costs, self._load, self._events = costs, load, Events()
        self._request_ms = (costs.rates.shared if layout.is_shared else costs.rates.apart).request_ms
        roles = Counter((place.gpu, place.role) for place in layout.places)
        sizes = [
            kv_tokens or costs.room.kv_tokens(roles[gpu, Role.PREFILL], roles[gpu, Role.DECODE])
            for gpu in range(layout.num_gpus)
        ]
        if costs.room.taken(load.longest) > min(sizes) * (1 - DECODE_RESERVE):
            raise ConfigError(
                f"a request of {load.longest} tokens: a GPU has room for {min(sizes)} tokens of KV "
                "beside the weights; shorten it, or take GPUs with more memory"
            )
        if layout.num_hosts > 1 and not gb_per_s:
            raise ConfigError(f"{layout.name}: without a rate between hosts nothing is known of what travels")
        self._router = Router(layout.places, sizes, costs, self._events, gb_per_s)
        self._gpus = [
            Gpu(costs, self._pool(gpu, sizes), targets=targets, host=gpu // layout.gpus_of_host)
            for gpu in range(layout.num_gpus)
        ]
        self.wires = Wires(gb_per_s)
        self._prefills: dict[str, PrefillWorker] = {}
        self._decodes: dict[str, DecodeWorker] = {}
        for name, role, gpu, _ in layout.places:
            if role is Role.PREFILL:
                self._prefills[name] = PrefillWorker(self._gpus[gpu], costs, self._events, self._found, self._first)
            else:
                self._decodes[name] = DecodeWorker(self._gpus[gpu], costs, self._events, self.wires, self._end)
        self._left = list(reversed(load.arrivals))
        self._requests: list[Request] = []

    def run(self) -> Outcome:
        """Run to the end; raises Stuck if some requests never end."""
        for _ in range(self._load.num_streams or len(self._left)):
            self._arrive_next(0.0)
        self._events.run()
        if any(request.ended_ms < 0 for request in self._requests):
            raise Stuck("requests wait for one another's KV blocks: there are too few")
        load = self._load
        seen = [each for each in self._requests if load.first_ms <= each.arrived_ms <= load.last_ms]
        gaps = [gap for decode in self._decodes.values() for gap in decode.gaps]
        begin_ms = max(load.first_ms, min(each.arrived_ms for each in self._requests))
        end_ms = min(load.last_ms, max(each.ended_ms for each in self._requests))
        num_tokens = sum(each.num_outputs for each in self._requests if begin_ms <= each.ended_ms <= end_ms)
        return Outcome(seen, gaps, num_tokens, end_ms - begin_ms)

    def _pool(self, index: int, sizes: list[int]) -> Pool:
        """Return the pool of a GPU with known prefixes; without room for all, each GPU gets others."""
        pool, known = Pool(sizes[index], self._router.contents(index)), self._load.known
        first = index * len(known) // len(sizes)
        for prefix in (*known[first:], *known[:first]):
            pool.keep(prefix)
        return pool

    def _arrive_next(self, now_ms: float) -> None:
        """Let the next request arrive, if any is left: at its time, or now."""
        if not self._left:
            return
        arrival = self._left.pop()
        time_ms = max(arrival.time_ms, now_ms)
        terms = EqualTerms(arrival.client)
        request = Request(time_ms, arrival.num_inputs, arrival.num_outputs, arrival.num_cached, arrival.prefix, terms)
        self._requests.append(request)
        found_ms = self._costs.found_ms(request.num_tokens - request.num_own)
        self._events.at(request.arrived_ms + self._request_ms + found_ms, lambda: self._submit(request))

    def _submit(self, request: Request) -> None:
        self._router.submit(request)
        self._pump()

    def _pump(self) -> None:
        """Send queued requests while a pair has room."""
        for request in self._router.started():
            self._prefills[request.route.prefill.id].take(request)
            if request.num_found:
                self._router.lighten(request)

    def _found(self, request: Request) -> None:
        """Update the router after a prefix was found."""
        self._router.lighten(request)
        self._pump()

    def _first(self, request: Request) -> None:
        """Note the first token of a completed prompt, and offer the prompt to its decode worker."""
        request.first_ms = self._events.now_ms
        gpu = self._prefills[request.route.prefill.id].gpu
        self._router.prompt_is_over(request)
        if request.num_outputs > 1:
            self._decodes[request.route.decode.id].offer(request, gpu)
        else:
            request.ended_ms = self._events.now_ms
            gpu.give_back(request, gpu.held_by(request))
            self._end(request)
        self._pump()

    def _end(self, request: Request) -> None:
        """Note the last token of a request."""
        self._router.is_over(request)
        if self._load.num_streams:
            self._arrive_next(self._events.now_ms)
        self._pump()


def simulate(
    layout: Layout,
    costs: Costs,
    load: Load,
    *,
    kv_tokens: int = 0,
    targets: SloSection = USUAL,
    gb_per_s: float = 0.0,
) -> Outcome:
    """Return the outcome of a load on a system; raises Stuck if the system stops, ConfigError without room."""
    return Simulation(layout, costs, load, kv_tokens=kv_tokens, targets=targets, gb_per_s=gb_per_s).run()
