"""Router and prefill workers in model time: real dispatcher and schedulers, a clock that jumps, a device that counts.

A step takes a fixed time and a time for each token, about what Qwen3-4B takes on an H200. Messages take half a
millisecond. Everything follows from the load: two runs are equal.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from common.serving.prompts.order import PromptOrder
from common.serving.prompts.scheduler import Chunk
from common.settings.config import NetSection, PrefillSection, RouterSection
from common.wire.messages.worker import FinishReason, Message, PrefillRequest, Role, TokenBatch, WorkerReady
from common.wire.values.packing import pack_ids
from common.wire.values.sampling_params import SamplingParams
from prefill_worker.sequence import PrefillSequence
from router.dispatch.completion.state import Completion
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.metrics import Metrics
from router.dispatch.worker_reports import WorkerReports
from router.placement.worker_pool import WorkerPool
from tests.support.completions import make_completion
from tests.support.layouts import allocator_of, no_prefixes
from tests.support.messages import kv_path, worker_ready
from tests.support.sequences import is_ending, prompt_scheduler, taken

MESSAGE_S = 0.0005
STEP_S = 0.0015
TOKEN_S = 18.5e-6
BLOCK_SIZE = 16
SECTION = PrefillSection().on("cuda")
FULL_STEP_S = STEP_S + SECTION.max_batch_tokens * TOKEN_S
MAX_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt to come."""

    arrival_s: float
    num_tokens: int
    client: str = ""
    priority: int = 0


@dataclass(slots=True)
class Outcome:
    """What became of it."""

    asked: Asked
    ttft_s: float


class FirstComeOrder(PromptOrder):
    """Nobody overtakes: what the bounds are measured by."""

    __slots__ = ()

    def _overtake(self, *_: object) -> None:
        return


class SimulatedWorker:
    """A prefill worker's loop around its scheduler: one step runs, one is queued."""

    def __init__(self, simulation: "Simulation", worker_id: str, num_blocks: int, first_come: bool) -> None:
        self.simulation, self.worker_id = simulation, worker_id
        allocator = allocator_of(num_blocks, BLOCK_SIZE)
        self.scheduler = prompt_scheduler(SECTION, allocator, 1 << 30, no_prefixes(allocator))
        if first_come:
            self.scheduler.order = FirstComeOrder(SECTION.max_batch_tokens, SECTION.max_num_seqs, 1 << 30)
        self.in_flight: deque[list[Chunk[PrefillSequence]]] = deque()
        self.free_s = 0.0
        self.busy_s = 0.0

    def accept(self, request: PrefillRequest) -> None:
        self.scheduler.add(PrefillSequence.of(request))
        self.launch()

    def launch(self) -> None:
        while len(self.in_flight) < MAX_IN_FLIGHT and (chunks := self.scheduler.schedule(self._num_launched())):
            self.scheduler.launched(chunks)
            self.in_flight.append(chunks)
            num_tokens = sum(chunk.num_tokens for chunk in chunks)
            duration_s = STEP_S + num_tokens * TOKEN_S
            self.busy_s += duration_s
            self.free_s = max(self.free_s, self.simulation.now_s) + duration_s
            self.simulation.at(self.free_s, self.collect)

    def collect(self) -> None:
        ended = [chunk.sequence for chunk in self.in_flight.popleft() if is_ending(self.scheduler, chunk.sequence)]
        ended = [sequence for sequence in ended if not self._goes_on(sequence)]
        for sequence in ended:
            self.scheduler.allocator.free(taken(self.scheduler, sequence))
        if ended:
            ids = tuple(sequence.request.request_id for sequence in ended)
            zeros, finish = pack_ids([0] * len(ids)), bytes([FinishReason.LENGTH] * len(ids))
            batch = TokenBatch(self.worker_id, 1, ids, zeros, zeros, zeros, finish)
            self.simulation.later(MESSAGE_S, lambda: self.simulation.reports.on_tokens(b"", batch))
        self.launch()

    def _num_launched(self) -> int:
        return sum(chunk.num_tokens for chunks in self.in_flight for chunk in chunks)

    def _goes_on(self, sequence: PrefillSequence) -> bool:
        """A later piece of it is in flight."""
        return any(chunk.sequence is sequence for chunks in self.in_flight for chunk in chunks)


@dataclass
class Simulation:
    """Runs a load to its end. `first_come`: without overtaking, and the router sends everything at once."""

    num_workers: int = 1
    num_blocks: int = 60_000
    first_come: bool = False
    now_s: float = 1.0
    workers: dict[str, SimulatedWorker] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = count()
        limits = RouterSection(max_requests=1 << 30, max_queued_tokens=1 << 50, request_timeout_s=1e9)
        pool = WorkerPool(NetSection(), 1e9 if self.first_come else limits.prefill_window, lambda: self.now_s)
        self.dispatcher = dispatcher = Dispatcher(limits, NetSection(), pool, self._send, Metrics())
        self.reports = WorkerReports(dispatcher.lifecycle, dispatcher.scheduler, pool, self._send, vocab_size=10)
        pool.add(self._ready("d", Role.DECODE), self.now_s)
        for name in [f"p{i}" for i in range(self.num_workers)]:
            self.workers[name] = SimulatedWorker(self, name, self.num_blocks, self.first_come)
            pool.add(self._ready(name, Role.PREFILL), self.now_s)
            pool.set_path(kv_path(name, "d"))

    def run(self, load: list[Asked]) -> list[Outcome]:
        """Every prompt's time to its first token, in the order of the load."""
        completions = [self._completion(number, asked) for number, asked in enumerate(load)]
        for completion, asked in zip(completions, load, strict=True):
            self.at(self.now_s + asked.arrival_s, lambda completion=completion: self.dispatcher.submit([completion]))  # type: ignore[misc]
        while self.events:
            self.now_s, _, act = heapq.heappop(self.events)
            act()
        assert self.dispatcher.num_active == 0
        pairs = zip(completions, load, strict=True)
        times = [(asked, completion.times) for completion, asked in pairs]
        return [Outcome(asked, each.first_token_s - each.submitted_s) for asked, each in times]

    @property
    def busy_s(self) -> float:
        """Device time of all steps."""
        return sum(worker.busy_s for worker in self.workers.values())

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (time_s, next(self.numbers), act))

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, act)

    def _send(self, to: str, message: Message) -> None:
        if isinstance(message, PrefillRequest):
            self.later(MESSAGE_S, lambda: self.workers[to].accept(message))

    def _ready(self, name: str, role: Role) -> WorkerReady:
        budget, endless = SECTION.max_batch_tokens if role is Role.PREFILL else 0, 1 << 30
        return worker_ready(
            name, role, num_blocks=(endless,), max_model_len=endless, max_batch_tokens=budget, max_num_seqs=endless
        )

    def _completion(self, number: int, asked: Asked) -> Completion:
        return make_completion(
            str(number), [0] * asked.num_tokens, SamplingParams(max_tokens=1),
            client=asked.client, priority=asked.priority,
        )  # fmt: skip


def poisson(rate: float, num_tokens: int, duration_s: float, seed: int, client: str = "") -> Iterator[Asked]:
    """Prompts of one length that arrive at random."""
    rng, now_s = random.Random(seed), 0.0
    while (now_s := now_s + rng.expovariate(rate)) < duration_s:
        yield Asked(now_s, num_tokens, client)


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
