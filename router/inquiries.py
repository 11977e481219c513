"""Asking workers about what nothing was heard of: is it there, or was a message lost?

A question travels behind the request on the same connection, and its answer behind all that the worker said
before. So who answers that it does not have an attempt will never have it, and has nothing more to say of it. The
prefill worker is asked first; when it has let go, the decode worker, which has it if it was handed off. A
long queue or a long prompt is no loss: whoever has it says so.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from common.config import NetSection
from common.wire.messages import Inquiry, InquiryReply
from common.wire.packing import pack_ids, unpack_ids
from router.assignments import Send
from router.member import Member
from router.request_state import Completion, State

BEATS = 2
"""Silence after which to ask, in heartbeats: of a dead worker it tells as well, as the question cannot be sent."""


class Inquiries:
    """Asks, and notes in each completion whether a worker has it; `deadlines.stall` says what follows."""

    def __init__(self, net: NetSection, send: Send, clock: Callable[[], float] = time.monotonic) -> None:
        self._net = net
        self._send = send
        self._clock = clock
        self._asked: dict[str, Completion] = {}  # by request id

    def ask(self, completions: Iterable[Completion]) -> None:
        """Ask about those of which nothing was heard for a while; call a few times a second."""
        now_s = self._clock()
        self._asked = {request_id: c for request_id, c in self._asked.items() if not c.is_terminal}
        quiet: defaultdict[Member, list[Completion]] = defaultdict(list)
        for completion in completions:
            heard_s = max(completion.started_s, completion.last_token_s, completion.asked_s)
            if (worker := _holder(completion)) is not None and now_s - heard_s > BEATS * self._net.heartbeat_s:
                completion.asked_s = now_s
                quiet[worker].append(completion)
        for worker, asked in quiet.items():
            self._asked |= {completion.request_id: completion for completion in asked}
            ids = tuple(completion.request_id for completion in asked)
            self._send(worker.id, Inquiry(ids, pack_ids(completion.attempt for completion in asked)))

    def on_reply(self, reply: InquiryReply) -> None:
        """A worker has some attempts, and not the others."""
        attempts = unpack_ids(reply.attempts)
        for request_id, attempt, is_here in zip(reply.request_ids, attempts, reply.are_here, strict=True):
            completion = self._asked.get(request_id)
            worker = _holder(completion) if completion else None
            if completion is None or worker is None or completion.attempt != attempt:
                continue
            if (worker.id, worker.epoch) != (reply.worker_id, reply.epoch):
                continue
            if is_here:
                completion.found_s = self._clock()
            elif completion.route is None or worker is completion.route.decode:
                completion.is_lost = True
            else:  # the decode worker is asked next
                completion.is_past_prefill, completion.asked_s = True, 0.0


def _holder(completion: Completion) -> Member | None:
    """The worker that should have it; None while it is queued and when it has ended."""
    if completion.route is None:
        return None
    is_prefilling = completion.state is State.PREFILLING and not completion.is_past_prefill
    return completion.route.prefill if is_prefilling else completion.route.decode
