"""State of a prompt in the prefill worker."""

import time
from dataclasses import dataclass

from common.serving.prompts.sequence import PromptSequence
from common.wire.messages.worker import PrefillRequest
from common.wire.values.packing import unpack_array


@dataclass(slots=True, eq=False)
class PrefillSequence(PromptSequence):
    """A prompt whose blocks are handed to a decode worker."""

    was_announced: bool = False  # the decode worker may be pulling blocks already
    holder: tuple[str, int] | None = None  # decode worker with more blocks, until a retrieval was tried

    @classmethod
    def of(cls, request: PrefillRequest) -> "PrefillSequence":
        """Make the sequence of a request that has just arrived."""
        holder = (request.holder_worker_id, request.holder_epoch) if request.holder_worker_id else None
        arrived_s = time.monotonic() - request.waited_ms / 1e3
        return cls(request, unpack_array(request.token_ids), arrived_s=arrived_s, holder=holder)
