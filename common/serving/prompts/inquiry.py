"""Reply to the router's inquiry about requests owned by a worker."""

from collections.abc import Callable

from common.wire.messages.worker import Inquiry, InquiryReply
from common.wire.values.packing import unpack_ids

Key = tuple[str, int]
"""(request_id, attempt)."""


def answer(inquiry: Inquiry, worker_id: str, epoch: int, has: Callable[[Key], bool]) -> InquiryReply:
    """Return the reply; send only after all earlier messages."""
    asked = zip(inquiry.request_ids, unpack_ids(inquiry.attempts), strict=True)
    return InquiryReply(worker_id, epoch, inquiry.request_ids, inquiry.attempts, bytes(map(has, asked)))
