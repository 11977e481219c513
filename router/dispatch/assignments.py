"""Bookkeeping of completions at workers: sent, counted in the pool, cancelled and given back, each once.

The dispatcher decides about a completion's begin and end.
"""

from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from itertools import groupby

from common.wire.messages.handoff import DecodeRequest
from common.wire.messages.worker import Abort, Message, PrefillRequest
from common.wire.values.block_key import STRETCH_BLOCKS, TextDigests
from common.wire.values.fields import MAX_INT32
from common.wire.values.packing import pack_ids
from router.dispatch.completion.state import Completion
from router.placement.capacity import layouts
from router.placement.predictions import Prediction
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

    def make_block_keys(self, completions: Iterable[Completion]) -> Iterator[None]:
        """Make the block keys of prompts if placement depends on keys; yield after each piece of work.

        Call before the completions are queued. Each yield is a chance to give other tasks a turn of the event loop.
        """
        reusable, num_tokens = layouts(self._pool), 0
        for _, choices in groupby(completions, key=lambda completion: id(completion.spec.prompt_ids)):
            first, *others = choices
            texts = tuple(TextKeys.of(layout, first.spec.salt) for layout in reusable)
            for text in texts:
                step = MAX_BLOCKS_AT_ONCE * text.block_size
                for begin in range(0, len(first.spec.prompt_ids), step):
                    if num_tokens >= step:
                        yield
                        num_tokens = 0
                    piece = first.spec.prompt_ids[begin : begin + step]
                    text.extend(self._digests_of(text).of(text.digest, pack_ids(piece)))
                    num_tokens += len(piece)
            for completion in (first, *others):
                completion.texts = texts

    def _digests_of(self, text: TextKeys) -> TextDigests:
        return self._digests.setdefault(text.block_size, TextDigests(text.block_size))

    def send(self, completion: Completion, route: Route, now_s: float) -> None:
        """Send the prompt to the workers of `route`."""
        attempt = completion.attempt
        attempt.route, completion.avoided = route, None
        attempt.transport = self._pool.paths.transport(route.prefill, route.decode)
        attempt.sent_tokens = completion.num_tokens
        attempt.started_s = now_s
        attempt.is_unproven = True
        self._pool.ledger.assign(route, attempt.sent_tokens, is_trial=completion.failures.is_suspect)
        attempt.predictions = self._predict(route, completion.texts, completion.num_tokens)
        request = prefill_request(completion, route, now_s)
        if completion.may_be_handed_over:
            self._send(route.decode.id, decode_request(request, completion.num_tokens - route.cost.num_handed_over))
        self._send(route.prefill.id, request)

    def reduce_prompt(self, completion: Completion, num_cached: int) -> int:
        """Record `num_cached` prompt tokens found in the pool; return the tokens saved at the prefill worker."""
        attempt = completion.attempt
        if attempt.route is None or not num_cached < completion.num_tokens:
            return 0
        if not completion.output.token_ids:
            completion.output.num_cached = num_cached
        num_before, num_left = attempt.sent_tokens, completion.num_tokens - num_cached
        if num_left >= num_before:
            return 0
        self._pool.ledger.reduce_prompt(attempt.route, num_before, num_left)
        attempt.sent_tokens = num_left
        return num_before - num_left

    def release_prompt(self, completion: Completion) -> None:
        """Release the prompt tokens counted at the prefill worker: the first token is here, or the attempt ended."""
        attempt = completion.attempt
        if attempt.route is not None and attempt.sent_tokens:
            self._pool.ledger.release_prompt(attempt.route, attempt.sent_tokens)
            attempt.sent_tokens = 0

    def prove(self, completion: Completion) -> None:
        """Mark an attempt that progressed or ended as proven: the workers may take other requests again."""
        attempt = completion.attempt
        if attempt.route is not None and attempt.is_unproven:
            attempt.is_unproven = False
            self._pool.ledger.prove(attempt.route)

    def cancel(self, completion: Completion) -> None:
        """Send an abort to the attempt's workers, unless an incarnation is gone."""
        attempt = completion.attempt
        if attempt.route is not None:
            abort = Abort(completion.spec.request_id, attempt.number)
            for worker in attempt.route.workers:
                if self._pool.get(worker.id, worker.epoch) is worker:
                    self._send(worker.id, abort)

    def cancel_handoff(self, completion: Completion) -> None:
        """Cancel the handoff at the decode worker, unless a decode step has already made a token."""
        attempt = completion.attempt
        if (
            completion.may_be_handed_over
            and not attempt.has_decoded(len(completion.output.token_ids))
            and attempt.route is not None
        ):
            self._send(attempt.route.decode.id, Abort(completion.spec.request_id, attempt.number))

    def release(self, completion: Completion) -> None:
        """Give back everything counted at the workers of the attempt.

        Blocks of the outputs are added to the prefix map, unless the decode worker's memory server reports its
        contents.
        """
        self.release_prompt(completion)
        attempt = completion.attempt
        if (route := attempt.route) is not None:
            if completion.texts and not self._pool.prefixes.is_reported(route.decode.pool):
                whole = [text.grown(completion.tokens_from(text.num_tokens)) for text in completion.texts]
                keys = {text.layout: text.keys for text in whole}.get(route.decode.ready.kv_layout)
                attempt.predictions += [] if keys is None else [self._pool.prefixes.predict(route.decode.pool, keys)]
            for prediction in attempt.predictions:
                self._pool.prefixes.end(prediction)
            self._pool.ledger.release(route)
            self.prove(completion)
            attempt.route, attempt.predictions = None, []

    def _predict(self, route: Route, texts: Iterable[TextKeys], num_tokens: int) -> list[Prediction]:
        """Predict the prompt's blocks in the pools of both workers: computed in the first, pulled into the second.

        The prefill worker takes snapshots of states, at the last full block before the last token.
        """
        prefixes, keys_in = self._pool.prefixes, {text.layout: text for text in texts}
        predictions = []
        if (text := keys_in.get(route.prefill.ready.kv_layout)) is not None:
            num_places = (num_tokens - 1) // text.block_size
            predictions.append(prefixes.predict(route.prefill.pool, text.keys, num_places, has_states=True))
        text = keys_in.get(route.decode.ready.kv_layout)
        if text is not None and route.decode.pool != route.prefill.pool:
            predictions.append(prefixes.predict(route.decode.pool, text.keys))
        return predictions


def prefill_request(completion: Completion, route: Route, now_s: float) -> PrefillRequest:
    """Make the message for the prefill worker.

    Outputs so far become part of the prompt. Log-probabilities already known are not asked for again.
    """
    spec, output = completion.spec, completion.output
    log, times = output.prompt_log, completion.times
    since_s = times.queued_s if output.token_ids else times.submitted_s
    return PrefillRequest(
        request_id=spec.request_id,
        attempt=completion.attempt.number,
        token_ids=pack_ids(spec.prompt_ids) + pack_ids(output.token_ids),
        num_outputs=len(output.token_ids),
        sampling=spec.sampling,
        decode_worker_id=route.decode.id,
        decode_epoch=route.decode.epoch,
        priority=spec.priority,
        turn=completion.turn,
        client=client_id(spec.client),
        num_prompt_logprobs=0 if log is None or log.is_complete else log.num_wanted,
        first_scored=0 if log is None else log.num_known,
        salt=spec.salt,
        holder_worker_id=route.holder.id if route.holder else "",
        holder_epoch=route.holder.epoch if route.holder else 0,
        most_tokens=route.most_tokens,
        waited_ms=min(MAX_INT32, int((now_s - since_s) * 1e3)),
    )


def decode_request(request: PrefillRequest, num_known: int) -> DecodeRequest:
    """Make the message for the decode worker, sent ahead of a prompt computed by a prefill worker."""
    return DecodeRequest(
        request_id=request.request_id,
        attempt=request.attempt,
        token_ids=request.token_ids,
        num_outputs=request.num_outputs,
        sampling=request.sampling,
        priority=request.priority,
        client=request.client,
        num_known=num_known,
    )


def client_id(client: str) -> int:
    """Return the number by which workers know a client; 0 for anonymous clients."""
    return int.from_bytes(blake2b(client.encode(), digest_size=8).digest()) >> 1 if client else 0
