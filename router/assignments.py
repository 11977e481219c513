"""What a completion has at its workers: sent, counted in the pool, cancelled and given back, each once.

Whether it is to begin or to end, the dispatcher decides.
"""

from array import array
from collections.abc import Callable, Iterable
from itertools import groupby

from common.wire.messages import Abort, Message
from router.binding import prefill_request
from router.prefix_map import beginnings_of
from router.request_state import Completion
from router.route import Route
from router.worker_pool import WorkerPool

Send = Callable[[str, Message], None]
"""Queue a message for a worker, by worker id."""


class Assignments:
    """Keeps the pool's counters and the routes of completions in step."""

    def __init__(self, pool: WorkerPool, send: Send) -> None:
        self._pool = pool
        self._send = send

    def find_out(self, completions: Iterable[Completion]) -> None:
        """By what it is known where their prompts' beginnings lie, if that makes a difference."""
        if not self._pool.has_choice:
            return
        for _, choices in groupby(completions, key=lambda completion: id(completion.prompt_ids)):
            first, *others = choices
            first.beginnings = beginnings_of(first.prompt_ids, first.salt)
            for completion in others:
                completion.beginnings = first.beginnings

    def begin(self, completion: Completion, route: Route, now_s: float, *, is_backlog: bool) -> None:
        """Send its prompt; with a backlog that may take the whole GPU, although others decode there."""
        completion.route, completion.avoided = route, None
        completion.sent_tokens = completion.num_tokens
        completion.started_s = now_s
        completion.is_unproven = True
        self._pool.assign(route, completion.sent_tokens, is_trial=completion.is_suspect)
        self._pool.note_text(route.prefill, completion.beginnings)
        whole_gpu = self._pool.has_gpu_alone(route) or is_backlog
        self._send(route.prefill.id, prefill_request(completion, route, whole_gpu))

    def lighten(self, completion: Completion, num_cached: int) -> int:
        """Of what it was sent so much is there already; returns how much less that leaves to its prefill worker."""
        if completion.route is None or not num_cached < completion.num_tokens:
            return 0
        if not completion.outputs:
            completion.num_cached = num_cached
        num_before, num_left = completion.sent_tokens, completion.num_tokens - num_cached
        if num_left >= num_before:
            return 0
        self._pool.lighten_prompt(completion.route, num_before, num_left)
        completion.sent_tokens = num_left
        return num_before - num_left

    def prompt_is_over(self, completion: Completion) -> None:
        """Its first token is here, or it is given up: the prefill worker has that much less to compute."""
        if completion.route is not None and completion.sent_tokens:
            self._pool.release_prompt(completion.route, completion.sent_tokens)
            completion.sent_tokens = 0

    def prove(self, completion: Completion) -> None:
        """It got on, or its attempt is over: nobody has to be kept from its workers any more."""
        if completion.route is not None and completion.is_unproven:
            completion.is_unproven = False
            self._pool.prove(completion.route)

    def cancel(self, completion: Completion) -> None:
        """Tell those of its workers that are alive to let go."""
        if completion.route is not None:
            abort = Abort(completion.request_id, completion.attempt)
            for worker in completion.route.workers:
                if self._pool.get(worker.id, worker.epoch) is worker:
                    self._send(worker.id, abort)

    def release(self, completion: Completion) -> None:
        """Give back what was counted at its workers, whose pool has its outputs, too, if that is one."""
        self.prompt_is_over(completion)
        if (route := completion.route) is not None:
            if completion.beginnings and route.prefill.pool == route.decode.pool:
                text = array("i", completion.prompt_ids) + array("i", completion.outputs)
                self._pool.note_text(route.decode, beginnings_of(text, completion.salt))
            self._pool.release(route)
            self.prove(completion)
            completion.route = None
