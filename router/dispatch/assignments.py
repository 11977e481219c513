"""Bookkeeping of completions at workers: sent, counted in the pool, cancelled and given back, each once.

The dispatcher decides about a completion's begin and end.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from common.wire.messages.worker import Abort, Message
from common.wire.values.block_key import STRETCH_BLOCKS, TextDigests
from common.wire.values.packing import pack_ids
from router.dispatch.binding import decode_request, prefill_request
from router.dispatch.request_state import Completion
from router.placement.prefix_map import Prediction
from router.placement.route import Route
from router.placement.text_keys import TextKeys
from router.placement.worker_pool import WorkerPool

Send = Callable[[str, Message], None]
"""Queues a message for a worker, by worker id."""
MAX_BLOCKS_AT_ONCE = 8 * STRETCH_BLOCKS
"""Blocks whose keys are made in a turn of the event loop: a quarter of a millisecond."""


class Assignments:
    """Keeps the pool's counters and the routes of completions in step."""

    def __init__(self, pool: WorkerPool, send: Send) -> None:
        self._pool = pool
        self._send = send
        self._digests: dict[int, TextDigests] = {}  # by block size

    def find_out(self, completions: Iterable[Completion]) -> Iterator[None]:
        """Make the block keys of prompts if placement depends on keys; yield after each piece of work.

        Call before the completions are queued. Each yield is a chance to give other tasks a turn of the event loop.
        """
        layouts, num_tokens = self._pool.layouts(), 0
        for _, choices in groupby(completions, key=lambda completion: id(completion.prompt_ids)):
            first, *others = choices
            texts = tuple(TextKeys.of(layout, first.salt) for layout in layouts)
            for text in texts:
                step = MAX_BLOCKS_AT_ONCE * text.block_size
                for begin in range(0, len(first.prompt_ids), step):
                    if num_tokens >= step:
                        yield
                        num_tokens = 0
                    piece = first.prompt_ids[begin : begin + step]
                    text.extend(self._digests_of(text).of(text.digest, pack_ids(piece)))
                    num_tokens += len(piece)
            for completion in (first, *others):
                completion.texts = texts

    def _digests_of(self, text: TextKeys) -> TextDigests:
        return self._digests.setdefault(text.block_size, TextDigests(text.block_size))

    def begin(self, completion: Completion, route: Route, now_s: float, *, is_backlog: bool) -> None:
        """Send the prompt to the workers of `route`.

        With a backlog the prompt may take the whole GPU, although other sequences decode there.
        """
        completion.attempt.route, completion.avoided = route, None
        completion.attempt.transport = self._pool.transport(route)
        completion.attempt.sent_tokens = completion.num_tokens
        completion.attempt.started_s = now_s
        completion.attempt.is_unproven = True
        self._pool.assign(route, completion.attempt.sent_tokens, is_trial=completion.is_suspect)
        completion.attempt.predictions = self._predict(route, completion.texts)
        whole_gpu = self._pool.has_gpu_alone(route) or is_backlog
        request = prefill_request(completion, route, whole_gpu)
        if completion.may_be_handed_over:
            self._send(route.decode.id, decode_request(request))
        self._send(route.prefill.id, request)

    def lighten(self, completion: Completion, num_cached: int) -> int:
        """Note `num_cached` prompt tokens found in the pool; return the tokens saved at the prefill worker."""
        if completion.attempt.route is None or not num_cached < completion.num_tokens:
            return 0
        if not completion.outputs:
            completion.num_cached = num_cached
        num_before, num_left = completion.attempt.sent_tokens, completion.num_tokens - num_cached
        if num_left >= num_before:
            return 0
        self._pool.lighten_prompt(completion.attempt.route, num_before, num_left)
        completion.attempt.sent_tokens = num_left
        return num_before - num_left

    def prompt_is_over(self, completion: Completion) -> None:
        """Release the prompt tokens counted at the prefill worker: the first token is here, or the attempt ended."""
        if completion.attempt.route is not None and completion.attempt.sent_tokens:
            self._pool.release_prompt(completion.attempt.route, completion.attempt.sent_tokens)
            completion.attempt.sent_tokens = 0

    def prove(self, completion: Completion) -> None:
        """Mark an attempt that progressed or ended as proven: the workers may take other requests again."""
        if completion.attempt.route is not None and completion.attempt.is_unproven:
            completion.attempt.is_unproven = False
            self._pool.prove(completion.attempt.route)

    def cancel(self, completion: Completion) -> None:
        """Send an abort to the attempt's workers, unless an incarnation is gone."""
        if completion.attempt.route is not None:
            abort = Abort(completion.request_id, completion.attempt.number)
            for worker in completion.attempt.route.workers:
                if self._pool.get(worker.id, worker.epoch) is worker:
                    self._send(worker.id, abort)

    def withdraw(self, completion: Completion) -> None:
        """Cancel the handoff at the decode worker, unless a decode step has already made a token."""
        if (
            completion.may_be_handed_over
            and not completion.attempt.decode_has_spoken(len(completion.outputs))
            and completion.attempt.route is not None
        ):
            self._send(completion.attempt.route.decode.id, Abort(completion.request_id, completion.attempt.number))

    def release(self, completion: Completion) -> None:
        """Give back everything counted at the workers of the attempt.

        Blocks of the outputs are added to the prefix map, unless the decode worker's memory server reports its
        contents.
        """
        self.prompt_is_over(completion)
        if (route := completion.attempt.route) is not None:
            if completion.texts and not self._pool.prefixes.is_told(route.decode.pool):
                whole = [text.grown(completion.tokens_from(text.num_tokens)) for text in completion.texts]
                completion.attempt.predictions += self._predict(route, whole)
            for prediction in completion.attempt.predictions:
                self._pool.prefixes.end(prediction)
            self._pool.release(route)
            self.prove(completion)
            completion.attempt.route, completion.attempt.predictions = None, []

    def _predict(self, route: Route, texts: Iterable[TextKeys]) -> list[Prediction]:
        """Predict the prompt's blocks in the pools of both workers: computed in the first, pulled into the second."""
        layouts = {worker.pool: worker.ready.kv_layout for worker in (route.prefill, route.decode)}
        keys_in = {text.layout: text.keys for text in texts}
        known = [(pool, keys_in[layout]) for pool, layout in layouts.items() if layout in keys_in]
        return [self._pool.prefixes.predict(pool, keys) for pool, keys in known]
