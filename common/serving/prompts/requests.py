"""Requests of a worker: their keys, reports of failed attempts, and answers to the router's inquiries."""

import logging
from collections.abc import Callable

from common.base.errors import ErrorCode
from common.wire.messages.worker import Inquiry, InquiryReply, RequestFailed
from common.wire.transport.router_link import RouterLink
from common.wire.values.packing import unpack_ids

logger = logging.getLogger(__name__)

Key = tuple[str, int]
"""(request_id, attempt)."""
Fail = Callable[[Key, ErrorCode, str], None]
"""Reports a failed attempt to the router, with the reason; nothing of the attempt is left here."""


def is_attempt(key: Key, request_id: str, attempt: int) -> bool:
    """Tell whether a key is an attempt of a request up to `attempt`."""
    return key[0] == request_id and key[1] <= attempt


def fail_request(link: RouterLink, key: Key, code: ErrorCode, reason: str) -> None:
    """Report a failed attempt to the router; nothing of the attempt is left here."""
    logger.warning("[%s #%d] %s", *key, reason)
    link.send(RequestFailed(*link.worker, *key, code, reason))


def answer(inquiry: Inquiry, worker_id: str, epoch: int, has: Callable[[Key], bool]) -> InquiryReply:
    """Return the reply; send only after all earlier messages."""
    asked = zip(inquiry.request_ids, unpack_ids(inquiry.attempts), strict=True)
    return InquiryReply(worker_id, epoch, inquiry.request_ids, inquiry.attempts, bytes(map(has, asked)))
