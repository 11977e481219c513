"""A simulated GPU: who works on it, and how fast a prompt step and a decode step are that run on it together."""

from dataclasses import dataclass
from typing import Protocol

from deploy.planning.simulation.pool import Pool
from deploy.planning.simulation.request import Request
from deploy.planning.step_times.costs import Costs


class Running(Protocol):
    """A worker whose step gets on faster or slower, by what runs beside it."""

    def settle(self) -> None:
        """Take account of what was done until now."""

    def hasten(self) -> None:
        """Go on at the speed that there is now."""

    def resume(self) -> None:
        """Whoever waits for KV blocks may find some."""


@dataclass(slots=True, eq=False)
class Gpu:
    """One of a host.

    Invariant: `prompt_ms` and `num_rows` are those of the steps that run.
    """

    host: int
    costs: Costs
    pool: Pool
    prompt_ms: float = 0.0  # what the prompt step at work takes alone; 0: none
    has_whole: bool = False  # that one has all multiprocessors
    num_rows: int = 0  # of the decode step at work; 0: none
    step_ms: float = 0.0  # what that one takes alone
    num_done: int = 0  # how often a prompt has got on here, or blocks have changed hands
    prefill: Running | None = None
    decode: Running | None = None

    @property
    def is_shared(self) -> bool:
        """Whether workers of both kinds are on it."""
        return self.prefill is not None and self.decode is not None

    def held_by(self, request: Request) -> int:
        """Tokens for which a prompt takes room here beside its prefix: where it may stay, for all that it will have."""
        return request.num_held if self.is_shared else request.num_own

    def give_back(self, request: Request, num_own: int) -> None:
        """Room for so many tokens and a prefix: whoever waits for some may go on."""
        self.pool.give_back(request, num_own)
        self.num_done += 1
        for worker in (self.decode, self.prefill):
            if worker is not None:
                worker.resume()

    @property
    def prompt_speed(self) -> float:
        """How much of a prompt step is done in a millisecond, of what is done alone."""
        if not self.num_rows:
            return 1.0
        rates = self.costs.rates
        if not self.has_whole:
            return self.prompt_ms / (self.prompt_ms * rates.beside_prompt + rates.beside_prompt_ms)
        wait_ms = rates.whole_wait * self.prompt_ms
        return wait_ms / (self.step_ms + wait_ms) if wait_ms else 1.0

    @property
    def step_speed(self) -> float:
        """The same of a decode step."""
        if not self.prompt_ms:
            return 1.0
        if not self.has_whole:
            return 1.0 / self.costs.beside_step(self.num_rows)
        return self.step_ms / (self.step_ms + self.costs.rates.whole_wait * self.prompt_ms)

    def set_prompt(self, alone_ms: float, *, has_whole: bool) -> None:
        """A prompt step begins, or with 0 ends."""
        self.num_done += 1
        if self.decode is not None:
            self.decode.settle()
        self.prompt_ms, self.has_whole = alone_ms, has_whole
        if self.decode is not None:
            self.decode.hasten()

    def set_step(self, num_rows: int, alone_ms: float) -> None:
        """A decode step begins, or with 0 ends."""
        is_change = bool(num_rows) != bool(self.num_rows) or self.has_whole
        if self.prefill is not None and self.prompt_ms and is_change:
            self.prefill.settle()
        self.num_rows, self.step_ms = num_rows, alone_ms
        if self.prefill is not None and self.prompt_ms and is_change:
            self.prefill.hasten()
