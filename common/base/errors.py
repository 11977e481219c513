"""The exceptions of the project and the error codes that ride on the wire.

BatonError
├── ConfigError            a setting is wrong; the program does not start
├── WireError              a frame is malformed, oversized, or of another version; it is dropped
├── ModelError             a checkpoint cannot be served: a missing, extra or misshapen tensor, an unknown type
├── MemoryShort            a device has no room for what is wanted, now
├── MemoryLost             the owner of a worker's memory is gone
├── RequestError           the client's fault; becomes an HTTP 4xx in OpenAI's shape
└── KVError
    ├── OutOfBlocks        scheduling only; never leaves a worker
    ├── LayoutMismatch     two workers' KV pools cannot exchange blocks
    └── TransferFailed     a pull did not happen
"""

from enum import IntEnum


class BatonError(Exception):
    """Root of everything this project raises on purpose."""


class ConfigError(BatonError):
    """A setting is unknown, out of range, or contradicts another."""


class WireError(BatonError):
    """A frame that cannot be trusted; the receiver counts it, logs it and drops it."""


class ModelError(BatonError):
    """A model directory that cannot be served as it is."""


class MemoryShort(BatonError):
    """There is no room for an allocation; there may be when others have ended, unless it is more than the device has.

    Args:
        message: how much is wanted, and how much there is.
        is_for_good: nobody's end would make room for it.
    """

    def __init__(self, message: str, *, is_for_good: bool = False) -> None:
        super().__init__(message)
        self.is_for_good = is_for_good


class MemoryLost(BatonError):
    """The memory server of a worker's device is gone, or hangs; the worker starts again with the next."""


class RequestError(BatonError):
    """A request that cannot be served as the client sent it.

    Args:
        message: names the value, the limit and the remedy.
        param: the request field at fault, if one is.
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
    """Something about KV blocks."""


class OutOfBlocks(KVError):
    """An allocation asked for more blocks than are free."""


class LayoutMismatch(KVError):
    """The peer's blocks do not have our shape, dtype or model."""


class TransferFailed(KVError):
    """A pull of KV blocks did not complete."""


class ErrorCode(IntEnum):
    """Why a worker could not finish a request; the router decides what the client sees."""

    INTERNAL = 1
    """The worker hit an unexpected error with this request alone; the router replays it elsewhere."""
    PREEMPTED = 2
    """The decode worker ran out of blocks and let the youngest request go; replay it."""
    HANDOFF_LOST = 3
    """The KV blocks were gone before the decode worker could pull them; replay it."""
    DRAINING = 4
    """The worker is leaving and takes nothing new; send it elsewhere."""
    NEVER_FITS = 5
    """The request is larger than the worker's whole pool; no replay can help."""
    NO_CHOICE = 6
    """The model's logits were all NaN or -inf: there was no token to choose, and would be none elsewhere."""
    GRAMMAR = 7
    """The request's grammar cannot be followed any further; no replay can help."""
    NOT_HERE = 8
    """A decode worker lacks more of a prompt than it computes beside prefill workers; one of those computes it."""
    STANDSTILL = 9
    """No KV blocks came free for the prompt while nothing moved: it is given back for others to get on; replay it."""
