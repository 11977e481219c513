"""Inquiries about silent requests: answers distinguish a long queue or prompt from a lost message.

Every attempt is owned by a single worker: by the prefill worker until the decode worker has received its offer, then by
the decode worker. So the prefill worker is asked first, then the decode worker. An answer follows every earlier message
of the worker on the connection. If both answer no, a message was lost.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from common.settings.config import NetSection
from common.wire.messages.worker import Inquiry, InquiryReply
from common.wire.values.packing import pack_ids, unpack_ids
from router.dispatch.assignments import Send
from router.dispatch.completion.state import Completion, State
from router.placement.member import Member

BEATS = 2
"""Silence before an inquiry, in heartbeats; an undeliverable inquiry also reveals a dead worker."""


Find = Callable[[str], Completion | None]
"""Returns the completion of a request id, until the completion has ended."""


class Inquiries:
    """Asks, and records in each completion whether a worker has the attempt; `deadlines.stall` draws the conclusion."""

    def __init__(self, net: NetSection, send: Send, find: Find, clock: Callable[[], float] = time.monotonic) -> None:
        self._net, self._send, self._find, self._clock = net, send, find, clock

    def ask(self, completions: Iterable[Completion]) -> None:
        """Ask about completions without news for a while; call a few times a second."""
        now_s, quiet = self._clock(), defaultdict[Member, list[Completion]](list)
        for completion in completions:
            latest_s = max(completion.attempt.started_s, completion.times.last_token_s, completion.attempt.asked_s)
            if (worker := _owner(completion)) is not None and now_s - latest_s > BEATS * self._net.heartbeat_s:
                completion.attempt.asked_s = now_s
                quiet[worker].append(completion)
        for worker, asked in quiet.items():
            ids = tuple(completion.spec.request_id for completion in asked)
            self._send(worker.id, Inquiry(ids, pack_ids(completion.attempt.number for completion in asked)))

    def on_reply(self, _: bytes, reply: InquiryReply) -> None:
        """Record which attempts a worker has, and which are missing."""
        attempts = unpack_ids(reply.attempts)
        for request_id, attempt, is_here in zip(reply.request_ids, attempts, reply.are_here, strict=True):
            completion = self._find(request_id)
            worker = _owner(completion) if completion else None
            if completion is None or worker is None or completion.attempt.number != attempt:
                continue
            if (worker.id, worker.epoch) != (reply.worker_id, reply.epoch):
                continue
            if is_here:
                completion.attempt.found_s = self._clock()
            elif completion.attempt.route is None or worker is completion.attempt.route.decode:
                completion.attempt.is_lost = True
            else:  # the decode worker is asked next
                completion.attempt.is_past_prefill, completion.attempt.asked_s = True, 0.0


def _owner(completion: Completion) -> Member | None:
    """Return the worker that owns the request, as far as the router knows; None while queued and after the end."""
    if completion.attempt.route is None:
        return None
    is_prefilling = completion.state is State.PREFILLING and not completion.attempt.is_past_prefill
    return completion.attempt.route.prefill if is_prefilling else completion.attempt.route.decode
