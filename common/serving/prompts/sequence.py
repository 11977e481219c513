"""A prompt to be computed: its request, its blocks, and its progress."""

from collections import deque
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from common.grammar.sequence_grammars import GrammarState
from common.kv.tables import Tables
from common.memory.client.lease_cache import Grant
from common.serving.prompts.requests import Key
from common.wire.messages.worker import PrefillRequest
from common.wire.values.kv_layout import Counts
from common.wire.values.sampling_params import SamplingParams


class DueBlock(NamedTuple):
    """A block to seal once the full block of an append-only group at `place` is sealed."""

    place: int
    block_id: int


@dataclass(slots=True)
class Beginning:
    """Chain of keys of a prompt, and the prompt's blocks until admission."""

    root: bytes = b""  # start of the chain; b"" if no block is looked up or sealed
    digests: list[bytes] = field(default_factory=list)  # digests of full blocks
    num_sealed: int = 0  # leading places found or sealed
    num_alike: int = 0  # leading places that another text had, though it cannot be resumed there
    num_marked: int = 0  # leading places whose blocks of windows are sealed, due, or never sealed
    stop: int = 0  # places after which others can resume the prompt next; 0: unknown
    due: list[DueBlock] = field(default_factory=list)  # of windows and states
    snapshots: list[int] = field(default_factory=list)  # found states, to be copied before the first step
    num_blocks: Counts = ()  # most blocks that the prompt holds, by group
    grant: Grant | None = None  # all blocks, until admission
    is_outdated: bool = False  # more blocks were sealed since the request for blocks
    is_filling: bool = False  # some granted blocks are lent, to be filled from another pool

    @property
    def next_digest(self) -> bytes:
        """Digest of the first full block not sealed yet; b"" when all are sealed."""
        return self.digests[self.num_sealed] if self.num_sealed < len(self.digests) else b""

    @property
    def last_digest(self) -> bytes:
        """Digest of the last full block, or the chain's root; b"" if no block is to be sealed."""
        return self.digests[-1] if self.digests else self.root

    @property
    def granted(self) -> list[int]:
        """Blocks of the grant, without lent blocks."""
        return [] if self.grant is None else self.grant.block_ids


@dataclass(slots=True, eq=False)
class PromptSequence:
    """A prompt of a request; `token_ids` is the prompt and, on a replay, the outputs so far."""

    request: PrefillRequest
    token_ids: MutableSequence[int]
    grammar: GrammarState | None = None
    beginning: Beginning = field(default_factory=Beginning)
    tables: Tables = ()
    arrived_s: float = 0.0  # begin of its wait (`waited_ms`), by the monotonic clock
    num_found: int = 0  # tokens found in the pool
    num_scheduled_tokens: int = 0  # computed by launched steps, or found
    num_in_flight: int = 0  # unfinished launched steps, which write the blocks
    ended: bool = False  # failed or aborted: tokens of steps in flight are dropped
    leaving: deque[list[int]] = field(default_factory=deque)  # blocks to free after each step in flight, oldest first

    @property
    def key(self) -> Key:
        return (self.request.request_id, self.request.attempt)

    @property
    def priority(self) -> int:
        """Priority; lower is earlier."""
        return self.request.priority

    @property
    def turn(self) -> int:
        """Order inside a priority; lower is earlier."""
        return self.request.turn

    @property
    def client(self) -> int:
        """Number of its client; anonymous ones are 0."""
        return self.request.client

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def outputs(self) -> Sequence[int]:
        """Outputs of earlier attempts, at the end of `token_ids`."""
        return self.token_ids[len(self.token_ids) - self.request.num_outputs :]

    @property
    def may_go_on(self) -> bool:
        """Tell whether outputs may follow the first token."""
        return self.request.num_outputs + 1 < self.request.sampling.max_tokens

    @property
    def num_slots(self) -> int:
        """Tokens with a place in blocks: the prompt, and the first output if others may follow."""
        return len(self.token_ids) + self.may_go_on

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_left(self) -> int:
        """Prompt tokens not in any launched step."""
        return len(self.token_ids) - self.num_scheduled_tokens

    @property
    def awaits_mask(self) -> bool:
        """Tell whether the grammar's mask is still missing."""
        return self.grammar is not None and self.grammar.mask is None

    def lacking(self, block_size: int) -> list[bytes]:
        """Return digests of blocks whose presence would save computing.

        At least one token is always computed. With prompt log-probabilities, all tokens are computed.
        """
        if self.request.num_prompt_logprobs:
            return []
        return self.beginning.digests[self.beginning.num_sealed : (len(self.token_ids) - 1) // block_size]

    @property
    def has_blocks(self) -> bool:
        """Tell whether blocks are granted, so the prompt may start before an earlier prompt without blocks."""
        return self.beginning.grant is not None

    @property
    def is_started(self) -> bool:
        """Tell whether the prompt is admitted, with blocks for the whole prompt."""
        return bool(self.tables)


AnyPrompt = TypeVar("AnyPrompt", bound=PromptSequence)
