"""Collects one step's tokens into the columns of a `TokenBatch`."""

from dataclasses import dataclass, field

from common.wire.messages import FinishReason, TokenBatch
from common.wire.packing import pack_ids


@dataclass(slots=True)
class TokenColumns:
    """One entry a token."""

    request_ids: list[str] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    output_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reasons: list[FinishReason] = field(default_factory=list)

    def add(self, request_id: str, attempt: int, output_index: int, token_id: int, reason: FinishReason) -> None:
        self.request_ids.append(request_id)
        self.attempts.append(attempt)
        self.output_indices.append(output_index)
        self.token_ids.append(token_id)
        self.finish_reasons.append(reason)

    def __bool__(self) -> bool:
        return bool(self.request_ids)

    def batch(self, worker_id: str, epoch: int) -> TokenBatch:
        return TokenBatch(
            worker_id=worker_id,
            epoch=epoch,
            request_ids=tuple(self.request_ids),
            attempts=pack_ids(self.attempts),
            output_indices=pack_ids(self.output_indices),
            token_ids=pack_ids(self.token_ids),
            finish_reasons=bytes(self.finish_reasons),
        )
