"""Asking a worker whether it has an attempt at a request, and what it answers.

A question travels behind all that was said before on its connection, and so does the answer.
"""

from collections.abc import Callable, Sequence

from common.wire.messages import Inquiry, InquiryReply
from common.wire.packing import pack_ids, unpack_ids

Key = tuple[str, int]
"""(request_id, attempt)."""


def question(keys: Sequence[Key]) -> Inquiry:
    """Whether the receiver has these."""
    return Inquiry(tuple(request_id for request_id, _ in keys), pack_ids(attempt for _, attempt in keys))


def asked(message: Inquiry | InquiryReply) -> list[Key]:
    """What a question or its answer is about."""
    return list(zip(message.request_ids, unpack_ids(message.attempts), strict=True))


def missing(reply: InquiryReply) -> list[Key]:
    """What the sender does not have, and will not get any more."""
    return [key for key, is_here in zip(asked(reply), reply.are_here, strict=True) if not is_here]


def answer(inquiry: Inquiry, worker_id: str, epoch: int, has: Callable[[Key], bool]) -> InquiryReply:
    """The reply, to be sent behind everything said so far."""
    return InquiryReply(worker_id, epoch, inquiry.request_ids, inquiry.attempts, bytes(map(has, asked(inquiry))))
