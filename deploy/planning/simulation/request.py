"""A simulated completion and its observed times."""

from dataclasses import dataclass, field

from deploy.planning.simulation.loads import Prefix
from router.placement.route import Demand, Route
from router.placement.text_keys import TextKeys


@dataclass(frozen=True, slots=True)
class EqualTerms:
    """Terms of completions that are all of one priority."""

    client: str = ""
    priority: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """A completion in the router's queue, and a prompt for `PromptOrder`; times in milliseconds, -1: not yet."""

    arrived_ms: float
    num_tokens: int  # of the prompt
    num_outputs: int
    num_cached: int = 0  # of the prompt, cached on every GPU
    prefix: Prefix | None = None  # with KV blocks shared among requests
    spec: EqualTerms = EqualTerms()
    turn: int = 0
    number: int = -1
    num_passing: int = 0
    texts: tuple[TextKeys, ...] = ()
    route: Route = field(init=False)  # once sent
    num_found: int = field(init=False)  # of the prompt, cached where computed
    num_done: int = field(init=False)  # of the prompt, found or in launched steps
    num_sent: int = 0  # of the prompt, to be computed in the router's view
    is_started: bool = False  # has KV blocks for the whole prompt
    has_blocks: bool = False  # never before the start
    first_ms: float = -1.0
    second_ms: float = -1.0
    ended_ms: float = -1.0

    def __post_init__(self) -> None:
        self.find(self.num_cached)

    def find(self, num_tokens: int) -> None:
        """Note cached tokens; the prompt is computed from there."""
        self.num_found = self.num_done = num_tokens

    @property
    def client(self) -> str:
        return self.spec.client

    @property
    def priority(self) -> int:
        return self.spec.priority

    def demand(self) -> Demand:
        return Demand(self.num_tokens, self.num_tokens + self.num_outputs, texts=self.texts)

    @property
    def is_suspect(self) -> bool:
        return False

    @property
    def num_own(self) -> int:
        """Prompt tokens not shared with other requests."""
        return self.num_tokens - self.num_cached - (self.prefix.num_tokens if self.prefix is not None else 0)

    @property
    def num_left(self) -> int:
        """Prompt tokens to launch."""
        return self.num_tokens - self.num_done

    @property
    def num_held(self) -> int:
        """Tokens in KV blocks of the request's own."""
        return self.num_own + self.num_outputs

    @property
    def ttft_ms(self) -> float:
        return self.first_ms - self.arrived_ms

    @property
    def first_gap_ms(self) -> float:
        """Time between the first two tokens; 0 for a single token."""
        return self.second_ms - self.first_ms if self.num_outputs > 1 else 0.0

    @property
    def tpot_ms(self) -> float:
        """Mean time between tokens; 0 for a single token."""
        return (self.ended_ms - self.first_ms) / (self.num_outputs - 1) if self.num_outputs > 1 else 0.0
