"""What a completion has at its workers: sent, counted in the pool, cancelled and given back, each once.

Whether it is to begin or to end, the dispatcher decides.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from common.wire.block_key import STRETCH_BLOCKS, TextDigests
from common.wire.messages import Abort, Message
from common.wire.packing import pack_ids
from router.binding import prefill_request
from router.prefix_map import Prediction
from router.request_state import Completion
from router.route import Route
from router.text_keys import TextKeys
from router.worker_pool import WorkerPool

Send = Callable[[str, Message], None]
"""Queue a message for a worker, by worker id."""
MAX_BLOCKS_AT_ONCE = 8 * STRETCH_BLOCKS
"""Of which keys are made in one turn of the event loop: a quarter of a millisecond."""
MAX_IN_VAIN = 1000
"""Prompts in a row of which nothing was found, from which on no keys are made only to count what is left of them."""


class Assignments:
    """Keeps the pool's counters and the routes of completions in step."""

    def __init__(self, pool: WorkerPool, send: Send) -> None:
        self._pool = pool
        self._send = send
        self._digests: dict[int, TextDigests] = {}  # by block size
        self._num_in_vain = 0  # prompts whose keys were made only for that, since something was found

    def find_out(self, completions: Iterable[Completion]) -> Iterator[None]:
        """Make the keys of their prompts, by which it is known what is there; after each step others have a turn.

        Call before they are queued.
        """
        spans, num_tokens = self._pool.spans(counts_too=self._num_in_vain < MAX_IN_VAIN), 0
        for _, choices in groupby(completions, key=lambda completion: id(completion.prompt_ids)):
            first, *others = choices
            num_blocks = {layout: len(first.prompt_ids) // layout.groups[0].block_size for layout in spans}
            texts = tuple(
                TextKeys.of(layout, first.salt, span) for layout, span in spans.items() if num_blocks[layout] >= span
            )
            for text in texts:
                step = MAX_BLOCKS_AT_ONCE // text.span * text.key_tokens
                for begin in range(0, len(first.prompt_ids), step):
                    if num_tokens >= step:
                        yield
                        num_tokens = 0
                    piece = first.prompt_ids[begin : begin + step]
                    if text.span > 1:
                        text.grow(piece)
                    else:
                        text.extend(self._digests_of(text).of(text.digest, pack_ids(piece)))
                    num_tokens += len(piece)
            self._num_in_vain += any(text.span > 1 for text in texts)
            for completion in (first, *others):
                completion.texts = texts

    def _digests_of(self, text: TextKeys) -> TextDigests:
        return self._digests.setdefault(text.key_tokens, TextDigests(text.key_tokens))

    def begin(self, completion: Completion, route: Route, now_s: float, *, is_backlog: bool) -> None:
        """Send its prompt; with a backlog that may take the whole GPU, although others decode there."""
        completion.route, completion.avoided = route, None
        completion.transport = self._pool.transport(route)
        completion.sent_tokens, completion.num_found = route.cost.num_computed, 0
        completion.started_s = now_s
        completion.is_unproven = True
        self._pool.assign(route, completion.sent_tokens, is_trial=completion.is_suspect)
        completion.predictions = self._predict(route, completion.texts)
        whole_gpu = self._pool.has_gpu_alone(route) or is_backlog
        self._send(route.prefill.id, prefill_request(completion, route, whole_gpu))

    def recount(self, completion: Completion, num_cached: int) -> int:
        """Of its prompt so much is there, whatever was expected; returns how much more than was told before."""
        if completion.route is None or not completion.sent_tokens or not num_cached < completion.num_tokens:
            return 0
        if not completion.outputs:
            completion.num_cached = num_cached
        num_before, num_left = completion.sent_tokens, completion.num_tokens - num_cached
        self._pool.recount_prompt(completion.route, num_before, num_left)
        completion.sent_tokens = num_left
        num_more = max(0, num_cached - completion.num_found)
        completion.num_found += num_more
        self._num_in_vain = 0 if num_more else self._num_in_vain
        return num_more

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
        """Give back what was counted at its workers; of blocks of its outputs their pool tells, or this does."""
        self.prompt_is_over(completion)
        if (route := completion.route) is not None:
            if not self._pool.prefixes.is_told(route.decode.pool):
                num_tokens = completion.num_tokens
                longer = [text for text in completion.texts if num_tokens >= text.num_tokens + text.key_tokens]
                whole = [text.grown(completion.tokens_from(text.num_tokens)) for text in longer]
                completion.predictions += self._predict(route, whole)
            for prediction in completion.predictions:
                self._pool.prefixes.end(prediction)
            self._pool.release(route)
            self.prove(completion)
            completion.route, completion.predictions = None, []

    def _predict(self, route: Route, texts: Sequence[TextKeys]) -> list[Prediction]:
        """What will be in the pools of its workers: what one computes is there, and so is what the other pulls."""
        if not texts:
            return []
        layouts = {worker.pool: worker.ready.kv_layout for worker in (route.prefill, route.decode)}
        text_in = {text.layout: text for text in texts}
        known = [(pool, text_in[layout]) for pool, layout in layouts.items() if layout in text_in]
        return [self._pool.prefixes.predict(pool, text.keys, text.span) for pool, text in known]
