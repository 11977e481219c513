"""The router of a simulation: the queue, the window of prompts sent ahead, and what each worker has been sent.

The rules of `scheduler` and `waiting_queue` in `router/dispatch` hold for a single client. No request overtakes because
of blocks elsewhere.
"""

from bisect import bisect_left, insort
from collections import deque

from common.settings.config import RouterSection
from deploy.planning.simulation.decode import DecodeWorker
from deploy.planning.simulation.pairing import Host, Pair, Pairing, expected
from deploy.planning.simulation.request import Request
from router.dispatch.scheduler import MAX_TRIED

BACKLOG_TOKENS = RouterSection().backlog_tokens
"""Queued tokens a prompt GPU from which prompts take whole GPUs."""


class Router:
    """A router and its queue of unassigned requests."""

    def __init__(self, hosts: list[Host]) -> None:
        self.pairing = Pairing(hosts)
        self._num_prompt_gpus = sum(len(host.prefills) for host in hosts)
        self._pairs: dict[int, Pair] = {}  # by number of the request
        self._by_turn: deque[Request] = deque()
        self._by_length: list[tuple[int, int, Request]] = []
        self._num_tokens = self._num_turns = self._num_sent = 0

    def submit(self, request: Request) -> None:
        request.turn, self._num_turns = self._num_turns, self._num_turns + request.num_inputs
        self._by_turn.append(request)
        insort(self._by_length, (request.num_inputs, request.number, request))
        self._num_tokens += request.num_inputs
        self.pump()

    def reenter(self, request: Request) -> None:
        """Queue a request given back by a decode worker, at its old turn."""
        _, decode = self._pairs[request.number]
        self.is_over(request)
        request.begin_again(avoided=decode)
        self._by_turn.insert(bisect_left(self._by_turn, request.turn, key=lambda each: each.turn), request)
        insort(self._by_length, (request.num_inputs, request.number, request))
        self._num_tokens += request.num_inputs
        self.pump()

    def pair_of(self, request: Request) -> Pair:
        """Return the pair of a request in flight."""
        return self._pairs[request.number]

    def lighten(self, request: Request) -> None:
        """Subtract tokens found cached by the prefill worker."""
        prefill, _ = self._pairs[request.number]
        num_left = request.num_inputs - request.num_found
        prefill.outstanding_tokens -= request.num_sent - num_left
        if request.overtakes:
            prefill.overtaking.remove(request.num_sent)
            insort(prefill.overtaking, num_left)
        request.num_sent = num_left
        self.pairing.review(prefill)

    def prompt_is_over(self, request: Request) -> None:
        """Note the first token of a request."""
        prefill, _ = self._pairs[request.number]
        prefill.outstanding_tokens -= request.num_sent
        prefill.num_outstanding -= 1
        if request.overtakes:
            prefill.overtaking.remove(request.num_sent)
        self.pairing.review(prefill)

    def is_over(self, request: Request) -> None:
        """Note the last token of a request."""
        _, decode = self._pairs.pop(request.number)
        decode.num_assigned -= 1
        decode.expected_tokens -= expected(request)
        self.pairing.review(decode)

    def pump(self) -> None:
        """Send queued requests, first by turn and then ahead of turn, while a pair has room."""
        while self._by_turn and (pair := self.pairing.choose(self._by_turn[0])):
            self._send(self._by_turn[0], pair)
        while (found := self._ahead()) is not None:
            request, pair = found
            request.overtakes = True
            self._send(request, pair)

    def _ahead(self) -> tuple[Request, Pair] | None:
        tried = {num_tokens: request for num_tokens, _, request in reversed(self._by_length[:MAX_TRIED])}
        for request in reversed(tried.values()):
            if (pair := self.pairing.choose(request, overtakes=True)) is not None:
                return request, pair
        return None

    def _send(self, request: Request, pair: Pair) -> None:
        self._discard(request)
        self.assign(request, pair)
        pair[0].take(request)
        if request.num_found:
            self.lighten(request)

    def assign(self, request: Request, pair: Pair) -> None:
        """Count a request as the pair's."""
        prefill, decode = self._pairs[request.number] = pair
        self._num_sent += 1
        prefill.last_turn = decode.last_turn = self._num_sent
        prefill.outstanding_tokens += request.num_inputs
        prefill.num_outstanding += 1
        request.num_sent = request.num_inputs
        if request.overtakes:
            insort(prefill.overtaking, request.num_sent)
        if request.prefix is not None:
            prefill.gpu.pool.known.add(request.prefix)
            decode.gpu.pool.known.add(request.prefix)
        decode.num_assigned += 1
        decode.expected_tokens += expected(request)
        neighbour = prefill.gpu.decode
        num_beside = neighbour.num_assigned if isinstance(neighbour, DecodeWorker) else 0
        is_backlog = self._num_tokens >= BACKLOG_TOKENS * self._num_prompt_gpus
        request.whole_gpu = is_backlog or num_beside == (neighbour is decode)
        self.pairing.review(prefill)

    def _discard(self, request: Request) -> None:
        """Remove a request from the queue."""
        if self._by_turn[0] is request:
            self._by_turn.popleft()
        else:
            self._by_turn.remove(request)
        del self._by_length[bisect_left(self._by_length, (request.num_inputs, request.number))]
        self._num_tokens -= request.num_inputs
