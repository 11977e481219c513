"""A simulated GPU: its workers, and the speed of a prompt step beside a decode step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.serving.turns.law import TurnLaw
from common.serving.turns.page import PAGE_BYTES, TurnPage
from common.settings.slo_section import SloSection
from deploy.planning.simulation.pool import Pool
from deploy.planning.simulation.request import Request
from deploy.planning.step_times.costs import Costs


class WholeGpu:
    """Forecasts of `TurnLaw` by the costs of prompt steps."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def span_ms(self, begin: int, end: int) -> float:
        return self._costs.whole.full_ms(end, self._costs.step_tokens, begin)

    def step_ms(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self._costs.whole.ms(chunks)


class Running(Protocol):
    """A worker whose step speeds up or slows down with its neighbour on the GPU."""

    def settle(self) -> None:
        """Account for the work done until now."""

    def hasten(self) -> None:
        """Continue at the present speed."""

    def resume(self) -> None:
        """Look for KV blocks again."""


class Decoding(Running, Protocol):
    """A decode worker, as its prefill worker sees it."""

    @property
    def num_rows(self) -> int:
        """Sequences in rows, or about to be."""

    @property
    def step_ms(self) -> float:
        """Time of the last step alone."""

    @property
    def client(self) -> str | None:
        """Client of all rows; None if there are several."""

    def end_leap(self) -> None:
        """End the leap with the running step."""

    def go_on(self) -> None:
        """Begin to decode, unless decoding, or if the present turn has had its step."""


@dataclass(slots=True, eq=False)
class Gpu:
    """A GPU.

    Invariant: `prompt_ms` and `num_rows` belong to the running steps.
    """

    costs: Costs
    pool: Pool
    targets: SloSection
    host: int = 0
    prompt_ms: float = 0.0  # time of the running prompt step alone; 0: none
    has_whole: bool = False  # the prompt step has all multiprocessors
    num_rows: int = 0  # of the running decode step; 0: none
    step_ms: float = 0.0  # time of the running decode step alone
    prefill: Running | None = None
    decode: "Decoding | None" = None
    law: TurnLaw = field(init=False)
    page: TurnPage = field(init=False, default_factory=lambda: TurnPage(bytearray(PAGE_BYTES)))

    def __post_init__(self) -> None:
        self.law = TurnLaw(self.targets, WholeGpu(self.costs))

    @property
    def is_shared(self) -> bool:
        """True if workers of both kinds are on the GPU."""
        return self.prefill is not None and self.decode is not None

    def held_by(self, request: Request) -> int:
        """Return the tokens taken by a prompt here, without the prefix; on a shared GPU with outputs to come."""
        num_own = request.num_held if self.is_shared else request.num_own
        return self.costs.room.taken(num_own, request.num_tokens - request.num_own)

    def give_back(self, request: Request, num_own: int) -> None:
        """Free `num_own` tokens and the prefix of a request; waiting workers may go on."""
        self.pool.give_back(request, num_own)
        for worker in (self.decode, self.prefill):
            if worker is not None:
                worker.resume()

    @property
    def prompt_speed(self) -> float:
        """Speed of a prompt step, relative to a step alone."""
        if not self.num_rows:
            return 1.0
        rates = self.costs.rates
        if not self.has_whole:
            return self.prompt_ms / (self.prompt_ms * rates.beside_prompt + rates.beside_prompt_ms)
        wait_ms = rates.whole_wait * self.prompt_ms
        return wait_ms / (self.step_ms + wait_ms) if wait_ms else 1.0

    @property
    def step_speed(self) -> float:
        """Speed of a decode step, relative to a step alone."""
        if not self.prompt_ms:
            return 1.0
        if not self.has_whole:
            return 1.0 / self.costs.beside_steps.at(self.num_rows)
        return self.step_ms / (self.step_ms + self.costs.rates.whole_wait * self.prompt_ms)

    def set_prompt(self, alone_ms: float, *, has_whole: bool) -> None:
        """Begin a prompt step, or end with 0."""
        if self.decode is not None:
            self.decode.settle()
        self.prompt_ms, self.has_whole = alone_ms, has_whole
        if self.decode is not None:
            self.decode.hasten()

    def set_step(self, num_rows: int, alone_ms: float) -> None:
        """Begin a decode step, or end with 0."""
        is_change = bool(num_rows) != bool(self.num_rows) or self.has_whole
        if self.prefill is not None and self.prompt_ms and is_change:
            self.prefill.settle()
        self.num_rows, self.step_ms = num_rows, alone_ms
        if self.prefill is not None and self.prompt_ms and is_change:
            self.prefill.hasten()
