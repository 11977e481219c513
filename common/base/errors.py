"""Exceptions of the project, and error codes of the wire.

BatonError
├── ConfigError            a setting is wrong; the program does not start.
├── WireError              a frame is malformed, oversized, or of another version; the receiver drops the frame.
├── ModelError             a checkpoint has a missing, extra or misshapen tensor or an unknown type.
├── MemoryShort            a device lacks room for an allocation now.
├── MemoryLost             the owner of a worker's memory is gone.
├── RequestError           the client's fault; becomes an HTTP 4xx in OpenAI's shape.
└── KVError
    ├── OutOfBlocks        scheduling only; never leaves a worker.
    ├── LayoutMismatch     two workers' KV pools cannot exchange blocks.
    └── TransferFailed     a pull did not happen.
"""

from enum import IntEnum


class BatonError(Exception):
    """Root of all exceptions raised on purpose."""


class ConfigError(BatonError):
    """A setting that is unknown, out of range, or contradicts another."""


class WireError(BatonError):
    """A frame that cannot be trusted; the receiver counts, logs and drops the frame."""


class ModelError(BatonError):
    """A model directory that cannot be served."""


class MemoryShort(BatonError):
    """A lack of room for an allocation; may pass when other processes end.

    Args:
        message: the size wanted and the size available.
        is_for_good: no process's end would make enough room.
    """

    def __init__(self, message: str, *, is_for_good: bool = False) -> None:
        super().__init__(message)
        self.is_for_good = is_for_good


class MemoryLost(BatonError):
    """A memory server that is gone or hangs; its device's worker restarts with the next server."""


class RequestError(BatonError):
    """A request that cannot be served as sent by the client.

    Args:
        message: names the value, the limit and the remedy.
        param: the request field at fault, if any.
        code: OpenAI-style slug.
        status: HTTP status.
        retry_after_s: seconds after which a retry makes sense (429 and 503).
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s


class KVError(BatonError):
    """Root of errors about KV blocks."""


class OutOfBlocks(KVError):
    """An allocation of more blocks than are free."""


class LayoutMismatch(KVError):
    """A peer's blocks of another shape, dtype or model than ours."""


class TransferFailed(KVError):
    """A pull of KV blocks that did not complete."""


class ErrorCode(IntEnum):
    """Reasons why a worker did not finish a request; the router decides what the client sees."""

    INTERNAL = 1
    """Unexpected error of the worker with one request alone; the router replays the request elsewhere."""
    PREEMPTED = 2
    """The decode worker ran out of blocks and gave up the youngest request; replay."""
    HANDOFF_LOST = 3
    """The KV blocks were gone before the decode worker pulled; replay."""
    DRAINING = 4
    """The worker is leaving and takes no new requests; send elsewhere."""
    NEVER_FITS = 5
    """The request is larger than the worker's whole pool; no replay can help."""
    NO_CHOICE = 6
    """All logits were NaN or -inf, so no token could be chosen; no replay can help."""
    GRAMMAR = 7
    """The request's grammar allows no further token; no replay can help."""
    NOT_HERE = 8
    """More of the prompt is missing than a decode worker computes beside prefill workers; send to prefill."""
    STANDSTILL = 9
    """No KV blocks came free while nothing moved; the prompt gives way to others; replay."""
