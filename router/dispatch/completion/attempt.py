"""An attempt at a completion: the route, and the reports of workers."""

from dataclasses import dataclass, field

from common.wire.values.output_token import OutputToken
from router.placement.predictions import Prediction
from router.placement.route import Route

PROVING_TOKENS = 8
"""Outputs of an attempt that prove progress: the first from a prompt, the others from decode steps."""
CRASHES_BEFORE_TRIAL = 2
"""Deaths before a trial: trying each completion of a dead worker alone would take longer than replays together."""


@dataclass(slots=True, eq=False)
class Attempt:
    """Facts of a single attempt; a replay is a new attempt. Times are seconds of the dispatcher's clock."""

    number: int = 0  # grows with every replay
    first_index: int = 0  # outputs before this attempt
    route: Route | None = None  # None while the completion is queued, and after its end
    transport: str = ""  # of KV blocks along the route
    sent_tokens: int = 0  # outstanding at the prefill worker until the first token
    predictions: list[Prediction] = field(default_factory=list)  # blocks expected in pools because of this attempt
    is_unproven: bool = False  # sent, without progress so far
    is_past_prefill: bool = False  # the prefill worker has let go
    is_lost: bool = False  # no worker has the attempt
    started_s: float = 0.0  # time of the send
    asked_s: float = 0.0  # last inquiry to a worker
    found_s: float = 0.0  # last reply by which a worker has the attempt
    gap_since_s: float = 0.0
    early: dict[int, tuple[OutputToken, int]] = field(default_factory=dict)  # held tokens by output index, with finish

    @property
    def has_gap(self) -> bool:
        """Tell whether later tokens are here and the next is missing."""
        return bool(self.early)

    @property
    def is_split(self) -> bool:
        """Tell whether a prefill worker computes the prompt for another worker."""
        return self.route is not None and not self.route.is_local

    def has_decoded(self, num_outputs: int) -> bool:
        """Tell whether a decode step made a token of this attempt, and no earlier token is missing."""
        return num_outputs > self.first_index + self.is_split

    def hold(self, output_index: int, token: OutputToken, finish_reason: int, now_s: float) -> None:
        """Keep a token received before earlier tokens."""
        if not self.early:
            self.gap_since_s = now_s
        self.early.setdefault(output_index, (token, finish_reason))


@dataclass(slots=True)
class Failures:
    """Failed attempts since the last progress of the completion."""

    num_counted: int = 0  # at most router.max_attempts
    num_crashes: int = 0  # counted failures by the death of a worker
    num_returns: int = 0  # by no fault of the completion

    @property
    def is_suspect(self) -> bool:
        """True after so many deaths of workers that the next attempt must be a trial."""
        return self.num_crashes >= CRASHES_BEFORE_TRIAL

    def reset(self) -> None:
        """Start anew: after progress, earlier failures were not the completion's fault or are over."""
        self.num_counted = self.num_crashes = self.num_returns = 0
