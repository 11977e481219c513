"""A simulated decode worker. While the rows stay unchanged, many steps are a single event: a leap.

In a leap each step takes a little longer than the last, because contexts grow. So the time of k steps is a quadratic
function of k, and the step running at a given moment is found by bisection.
"""

from collections import Counter, deque
from collections.abc import Callable
from heapq import heappop, heappush

from deploy.planning.simulation.events import Events
from deploy.planning.simulation.gpu import Gpu
from deploy.planning.simulation.loads import Prefix
from deploy.planning.simulation.request import Request
from deploy.planning.simulation.wires import Wires
from deploy.planning.step_times.costs import Costs

LAUNCH_MS = 0.7
"""Time before a step's end at which the next is launched (`decode_worker/batch/pace.py`)."""


class DecodeWorker:
    """A decode worker.

    A sequence is admitted once a row and KV blocks for all of its tokens are free. The simulator knows the number of
    tokens, so nothing is ever preempted.

    Args:
        on_end: called with each finished request.
    """

    def __init__(self, gpu: Gpu, costs: Costs, events: Events, wires: Wires, on_end: Callable[[Request], None]) -> None:
        self.gpu, self.costs, self.events, self.wires, self._on_end = gpu, costs, events, wires, on_end
        self.gaps: list[tuple[float, int]] = []  # between tokens except first gaps: ms, count
        self.link_free_ms = 0.0  # end of all copies
        self._offered: deque[tuple[Request, Gpu]] = deque()  # no row or no blocks yet
        self._num_taken = 0  # rows taken or reserved
        self._joining: list[tuple[float, Request]] = []  # with arrival time, for the next launch
        self._fresh: list[Request] = []  # in their first step
        self._rows: list[tuple[int, int, Request]] = []  # a heap, by last step
        self._num_steps, self._num_tokens = 0, 0  # finished steps; context tokens of all rows
        self._prefixes = Counter[Prefix]()  # number of rows by prefix
        self._clients = Counter[str]()  # number of rows by client
        # The leap: time of the running step, growth of each following step, and number of steps.
        self._step_ms = self._left_ms = self._slope_ms = self._since_ms = self._boundary_ms = 0.0
        self._length, self._version, self._speed = 0, 0, 1.0
        self._served = 0  # turn of the last begun step; 0: none
        gpu.decode = self

    def offer(self, request: Request, source: Gpu) -> None:
        """Offer a computed prompt whose blocks lie at `source`."""
        self._offered.append((request, source))
        self.resume()

    def resume(self) -> None:
        """Take offered prompts while there is room."""
        while self._offered and self._num_taken < self.costs.max_rows:
            request, source = self._offered[0]
            pool, is_here = self.gpu.pool, source is self.gpu
            if not is_here and pool.wanted(request, self._taken(request)) > pool.free_tokens:
                return
            self._offered.popleft()
            self._num_taken += 1
            num_moved = request.num_own
            if request.prefix is not None and not pool.has(request.prefix):
                num_moved += request.prefix.num_tokens
            if not is_here:
                pool.take(request, self._taken(request))
            self._fetch(request, source, num_moved)

    def settle(self) -> None:
        """See `Running`."""
        if self._length:
            elapsed_ms = (self.events.now_ms - self._since_ms) * self._speed
            low, high = 0, self._length - 1  # the last end is an event
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if self._time_of(middle) <= elapsed_ms else (low, middle - 1)
            self._pass(low, elapsed_ms)

    @property
    def num_rows(self) -> int:
        """See `Decoding`."""
        return len(self._rows) + len(self._joining)

    @property
    def step_ms(self) -> float:
        """See `Decoding`."""
        return self._step_ms

    @property
    def client(self) -> str | None:
        """See `Decoding`."""
        return next(iter(self._clients)) if len(self._clients) == 1 else None

    @property
    def _turn(self) -> int:
        return self.gpu.page.turn(int(self.events.now_ms * 1e3))

    def end_leap(self) -> None:
        """See `Decoding`."""
        self.settle()
        self.hasten()

    def go_on(self) -> None:
        """See `Decoding`; the prefill worker calls at the end of a turn."""
        if self._length or not self.num_rows:
            return
        if self._turn and self._turn == self._served:
            self.gpu.set_step(0, 0.0)
        else:
            self._begin()

    def hasten(self) -> None:
        """See `Running`; a joining request, or a turn, ends the leap with the running step."""
        if not self._length:
            return
        self._speed = self.gpu.step_speed
        self._version += 1
        if self._joining or self._turn:
            self._length = 1
        version, length = self._version, self._length
        end_ms = self.events.now_ms + self._time_of(length) / self._speed
        self.events.at(end_ms, lambda: self._end(version, length))

    def _fetch(self, request: Request, source: Gpu, num_moved: int) -> None:
        """Let a request join once its blocks are here; within a host all chunks but the last have been copied ahead.

        A copy delays the running step, because the copy takes multiprocessors and memory bandwidth.
        """
        events, rates = self.events, self.costs.rates
        if source is self.gpu:
            events.at(events.now_ms + rates.shared.handoff_ms, lambda: self._join(request, source))
            return
        if source.host != self.gpu.host:
            arrived_ms = self._fetch_from_afar(source, request.num_tokens, num_moved)
            events.at(arrived_ms + rates.apart.handoff_ms, lambda: self._join(request, source))
            return
        copy_ms = self.costs.copies.at((num_moved - 1) % self.costs.step_tokens + 1)
        self.link_free_ms = max(self.link_free_ms, events.now_ms) + copy_ms
        if self._length:
            self.settle()
            self._left_ms += copy_ms
            self.hasten()
        events.at(self.link_free_ms + rates.apart.handoff_ms, lambda: self._join(request, source))

    def _fetch_from_afar(self, source: Gpu, num_tokens: int, num_moved: int) -> float:
        """Send a prompt's blocks over the hosts' links; return when they are here.

        What is complete before the last step may be sent while that runs.
        """
        now_ms, step_tokens, num_bytes = (
            self.events.now_ms,
            self.costs.step_tokens,
            self.costs.rates.shape.context_bytes,
        )
        num_last = (num_tokens - 1) % step_tokens + 1
        num_ahead = max(0, num_moved - num_last)
        if num_ahead:
            computing_ms = self.costs.whole.prompt_ms(num_tokens, step_tokens, num_tokens - num_last)
            self.wires.send(source.host, self.gpu.host, num_bytes(num_ahead), now_ms - computing_ms)
        return self.wires.send(source.host, self.gpu.host, num_bytes(num_moved) - num_bytes(num_ahead), now_ms)

    def _join(self, request: Request, source: Gpu) -> None:
        if source is not self.gpu:
            source.give_back(request, source.held_by(request))
        self._joining.append((self.events.now_ms, request))
        if self._length:
            self.end_leap()
            return
        if not self._rows:
            self._boundary_ms = self.events.now_ms
        self.go_on()

    def _begin(self) -> None:
        """Begin the next leap with requests present at its launch, up to the end of the first row."""
        launched_ms = self.events.now_ms - LAUNCH_MS if self._rows else self.events.now_ms
        self._fresh = [request for since_ms, request in self._joining if since_ms <= launched_ms]
        self._joining = [each for each in self._joining if each[0] > launched_ms]
        for request in self._fresh:
            heappush(self._rows, (self._num_steps + request.num_outputs - 1, request.number, request))
            self._num_tokens += request.num_tokens
            self._clients[request.client] += 1
            if request.prefix is not None:
                self._prefixes[request.prefix] += 1
        num_rows, self._since_ms = len(self._rows), self.events.now_ms
        self._served = self._turn
        if not num_rows:
            self._length = 0
            self.gpu.set_step(0, 0.0)
            return
        self._length = self._rows[0][0] - self._num_steps
        num_spared = sum((count - 1) * prefix.num_tokens for prefix, count in self._prefixes.items())
        self._step_ms = self._left_ms = self.costs.steps.ms(num_rows, self._num_tokens, num_spared)
        last_ms = self.costs.steps.ms(num_rows, self._num_tokens + num_rows * self._length, num_spared)
        self._slope_ms = (last_ms - self._step_ms) / self._length
        self.gpu.set_step(num_rows, self._step_ms)
        self.hasten()

    def _end(self, version: int, length: int) -> None:
        """End `length` steps of the leap, unless the leap has changed since."""
        if version != self._version:
            return
        self._pass(length, self._time_of(length))
        self._length = 0
        over = []
        while self._rows and self._rows[0][0] <= self._num_steps:
            over.append(heappop(self._rows)[2])
        for request in over:
            request.ended_ms = self.events.now_ms
            self._num_tokens -= request.num_tokens + request.num_outputs - 1
            self._clients -= Counter([request.client])
            if request.prefix is not None:
                self._prefixes -= Counter([request.prefix])
        self._num_taken -= len(over)
        if self.num_rows:
            self.go_on()
        else:
            self.gpu.set_step(0, 0.0)
        for request in over:
            self.gpu.give_back(request, self._taken(request))
            self._on_end(request)
        self.resume()

    def _taken(self, request: Request) -> int:
        """Return the tokens taken by all of a request, without the prefix."""
        return self.costs.room.taken(request.num_held, request.num_tokens - request.num_own)

    def _time_of(self, num_steps: int) -> float:
        """Return the time of `num_steps` steps of the leap alone; of the first, only the rest counts."""
        if not num_steps:
            return 0.0
        later = num_steps - 1
        return self._left_ms + later * self._step_ms + self._slope_ms * num_steps * later / 2

    def _pass(self, num_steps: int, elapsed_ms: float) -> None:
        """Account for `num_steps` finished steps, and for the time spent in the next; both times as if alone."""
        if num_steps:
            first_ms = self._since_ms + self._left_ms / self._speed
            last_ms = self._since_ms + self._time_of(num_steps) / self._speed
            for request in self._fresh:
                request.second_ms = first_ms
            self.gaps.append((first_ms - self._boundary_ms, len(self._rows) - len(self._fresh)))
            if num_steps > 1:
                self.gaps.append(((last_ms - first_ms) / (num_steps - 1), len(self._rows) * (num_steps - 1)))
            self._fresh, self._boundary_ms = [], last_ms
            self._num_steps += num_steps
            self._num_tokens += num_steps * len(self._rows)
            left_ms = self._time_of(num_steps + 1) - elapsed_ms
            self._step_ms += num_steps * self._slope_ms
            self._length -= num_steps
        else:
            left_ms = self._left_ms - elapsed_ms
        self._left_ms, self._since_ms = max(0.0, left_ms), self.events.now_ms
