"""One simulated completion, and what is seen of it."""

from dataclasses import dataclass, field

from deploy.planning.simulation.loads import Prefix


@dataclass(slots=True, eq=False)
class Request:
    """Times in milliseconds of the simulation; -1 is not yet. To `PromptOrder` it is a prompt."""

    number: int
    arrived_ms: float
    num_inputs: int
    num_outputs: int
    num_cached: int = 0  # of the prompt, that are there already, wherever it goes
    prefix: Prefix | None = None  # whose KV blocks it has in common with others
    priority: int = 0
    turn: int = 0
    num_found: int = field(init=False)  # of the prompt, that are there where it is computed
    num_done: int = field(init=False)  # of the prompt, those and what is in steps that are launched
    num_sent: int = 0  # of the prompt, that the router takes its prefill worker to have to compute
    is_started: bool = False  # has KV blocks for all of its prompt
    has_blocks: bool = False  # never before it is started
    whole_gpu: bool = False  # its prompt may have all of the GPU
    overtakes: bool = False  # sent ahead of its turn
    num_returns: int = 0  # how often it was given back at a standstill
    avoided: object = None  # the decode worker that gave it back last: any other is better
    first_ms: float = -1.0
    second_ms: float = -1.0
    ended_ms: float = -1.0
    last_step: int = field(default=-1)  # of its decode worker

    def __post_init__(self) -> None:
        self.find(self.num_cached)

    def find(self, num_tokens: int) -> None:
        """So many are there, behind which it is computed."""
        self.num_found = self.num_done = num_tokens

    def begin_again(self, avoided: object) -> None:
        """That decode worker has given it back: it is computed again, as its blocks are for others."""
        self.find(self.num_cached)
        self.is_started = self.overtakes = False
        self.num_returns, self.avoided = self.num_returns + 1, avoided

    @property
    def num_own(self) -> int:
        """Prompt tokens that nobody else has."""
        return self.num_inputs - self.num_cached - (self.prefix.num_tokens if self.prefix is not None else 0)

    @property
    def num_left(self) -> int:
        """Prompt tokens to launch."""
        return self.num_inputs - self.num_done

    @property
    def num_held(self) -> int:
        """Tokens for which it takes KV blocks of its own."""
        return self.num_own + self.num_outputs

    @property
    def ttft_ms(self) -> float:
        return self.first_ms - self.arrived_ms

    @property
    def first_gap_ms(self) -> float:
        """0 of a single token."""
        return self.second_ms - self.first_ms if self.num_outputs > 1 else 0.0

    @property
    def tpot_ms(self) -> float:
        """0 of a single token."""
        return (self.ended_ms - self.first_ms) / (self.num_outputs - 1) if self.num_outputs > 1 else 0.0

    @property
    def e2e_ms(self) -> float:
        return self.ended_ms - self.arrived_ms
