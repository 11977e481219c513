"""Completions without a worker: a bounded queue, sorted in two ways.

The order by turn is the order of sending. The order by length exists because short prompts may overtake (see
`common.serving.prompts.order`, the source of both orders). In both, lower `priority` comes before everything else.

Invariant: `num_tokens` is the sum over all queued completions. Any completion is found in O(log n), because a client
may go away at any time.
"""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import count
from typing import Generic, Protocol, TypeVar

from common.settings.config import RouterSection
from router.dispatch.room import admit
from router.placement.route import Demand

Key = tuple[int, ...]
MAX_CLIENTS = 10_000
"""Clients whose last turn is remembered; beyond, the least recent client starts anew."""


class Terms(Protocol):
    """Place of a completion among those of other clients."""

    @property
    def client(self) -> str: ...

    @property
    def priority(self) -> int: ...


class Waiting(Protocol):
    """A completion without a worker."""

    turn: int
    number: int
    num_passing: int  # computed tokens of others that have passed

    @property
    def spec(self) -> Terms: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def is_suspect(self) -> bool: ...

    def demand(self) -> Demand: ...


AnyWaiting = TypeVar("AnyWaiting", bound=Waiting)


class WaitingQueue(Generic[AnyWaiting]):
    """The queue of completions, within limits."""

    def __init__(self, limits: RouterSection) -> None:
        self.num_tokens = 0
        self._limits = limits
        self._turns = Turns()
        self._numbers = count()
        self._by_turn: list[tuple[Key, AnyWaiting]] = []
        self._by_length: list[tuple[Key, AnyWaiting]] = []
        self._num_queued: Counter[str] = Counter()  # by client

    def __len__(self) -> int:
        return len(self._by_turn)

    def admit(self, num_completions: int, num_tokens: int, num_active: int) -> None:
        """Raise RequestError unless the request fits: status 400 if too large for ever, 429 if too large now."""
        limits = self._limits
        most = limits.max_requests, limits.max_queued_tokens
        admit(num_completions, num_tokens, num_active, self.num_tokens, *most)

    def add(self, completion: AnyWaiting) -> None:
        """Add a new completion and give it a turn."""
        completion.turn = self._turns.next(completion.spec.client, completion.num_tokens)
        completion.number = next(self._numbers)
        self.add_again(completion)

    def add_again(self, completion: AnyWaiting) -> None:
        """Add a completion from a failed attempt, at its old turn."""
        num_tokens = completion.num_tokens
        insort(self._by_turn, (_turn(completion), completion))
        insort(self._by_length, (_length(completion, num_tokens), completion))
        self._num_queued[completion.spec.client] += 1
        self.num_tokens += num_tokens

    def by_turn(self) -> Iterator[AnyWaiting]:
        """Yield completions by turn; the caller may take out the completion yielded last."""
        place = 0
        while place < len(self._by_turn):
            completion = self._by_turn[place][1]
            yield completion
            place += place < len(self._by_turn) and self._by_turn[place][1] is completion

    def shortest(self, num: int) -> list[AnyWaiting]:
        """Return the `num` shortest completions of the lowest priority number."""
        shortest = [completion for _, completion in self._by_length[:num]]
        return [completion for completion in shortest if completion.spec.priority == shortest[0].spec.priority]

    def take(self, completion: AnyWaiting) -> None:
        """Remove a completion bound for a worker, and advance the time of turns."""
        self._turns.serve(completion.num_tokens, len(self._num_queued), self._by_turn[0][1].turn)
        self.remove(completion)

    def remove(self, completion: AnyWaiting) -> None:
        """Remove a completion, if present."""
        if not _remove(self._by_turn, _turn(completion)):
            return
        num_tokens = completion.num_tokens
        _remove(self._by_length, _length(completion, num_tokens))
        self.num_tokens -= num_tokens
        self._num_queued[completion.spec.client] -= 1
        if not self._num_queued[completion.spec.client]:
            del self._num_queued[completion.spec.client]
        if not self._by_turn:
            self._turns.reset()


class Turns:
    """Turns of prompts: first come, first served for a client, and fair between clients.

    Start-time fair queueing (Goyal, Vin and Cheng, "Start-Time Fair Queueing", SIGCOMM 1996) over prompt tokens. Sheng
    et al. count prompt tokens as a client's cost in "Fairness in Serving Large Language Models" (OSDI 2024). Time is
    counted in tokens served to each client with queued prompts, as if all were served at once. The turn of a prompt is
    the present time, or the end of the client's earlier prompts if later. So a client with many prompts waits behind
    itself, a new client starts with the others, and unused turns are not saved up.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: OrderedDict[str, float] = OrderedDict()  # end of each client's prompts, in tokens

    def next(self, client: str, num_tokens: int) -> int:
        """Return the turn of a new prompt."""
        turn = max(self._now, self._ends.get(client, 0.0))
        self._ends[client] = turn + num_tokens
        self._ends.move_to_end(client)
        if len(self._ends) > MAX_CLIENTS:
            self._ends.popitem(last=False)
        return int(turn)

    def serve(self, num_tokens: int, num_clients: int, first_turn: int) -> None:
        """Advance the time by a prompt that leaves for a worker.

        Args:
            num_clients: clients with queued prompts, the leaving prompt's client included.
            first_turn: turn of the first queued prompt.
        """
        self._now = max(self._now, first_turn) + num_tokens / num_clients

    def reset(self) -> None:
        """Forget all clients' debts, because the queue is empty."""
        self._ends.clear()


def _turn(completion: Waiting) -> Key:
    return completion.spec.priority, completion.turn, completion.number


def _length(completion: Waiting, num_tokens: int) -> Key:
    return completion.spec.priority, num_tokens, completion.turn, completion.number


def _remove(entries: list[tuple[Key, AnyWaiting]], key: Key) -> bool:
    """Remove the entry of `key` and tell whether it was there; a key ends with a unique number."""
    place = bisect_left(entries, key, key=lambda entry: entry[0])
    if place == len(entries) or entries[place][0] != key:
        return False
    del entries[place]
    return True
