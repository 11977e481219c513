"""Conversion between a step's tokens and the columns of a `TokenBatch`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec.structs import asdict

from common.wire.messages.worker import FinishReason, LogprobBatch, TokenBatch
from common.wire.values.output_token import Logprobs, OutputToken, plain_token
from common.wire.values.packing import pack_floats, pack_ids, unpack_floats, unpack_ids

NOTHING_ASKED = Logprobs((), ())


TokenRow: TypeAlias = tuple[str, int, int, OutputToken, int]
"""Request, attempt, output index, token, finish reason."""


@dataclass(slots=True)
class TokenColumns:
    """Columns with an entry a token; a request's tokens stand in the order of their indices."""

    request_ids: list[str] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    output_indices: list[int] = field(default_factory=list)
    tokens: list[OutputToken] = field(default_factory=list)
    finish_reasons: list[FinishReason] = field(default_factory=list)

    def add(self, request_id: str, attempt: int, output_index: int, token: OutputToken, reason: FinishReason) -> None:
        self.request_ids.append(request_id)
        self.attempts.append(attempt)
        self.output_indices.append(output_index)
        self.tokens.append(token)
        self.finish_reasons.append(reason)

    def __bool__(self) -> bool:
        return bool(self.request_ids)

    def batch(self, worker_id: str, epoch: int) -> TokenBatch:
        """Return the message of all tokens: a `LogprobBatch` if any token has log-probabilities."""
        batch = TokenBatch(
            worker_id=worker_id,
            epoch=epoch,
            request_ids=tuple(self.request_ids),
            attempts=pack_ids(self.attempts),
            output_indices=pack_ids(self.output_indices),
            token_ids=pack_ids(token.token_id for token in self.tokens),
            finish_reasons=bytes(self.finish_reasons),
        )
        if all(token.logprobs is None for token in self.tokens):
            return batch
        logprobs = [token.logprobs or NOTHING_ASKED for token in self.tokens]
        return LogprobBatch(
            **asdict(batch),
            num_logprobs=pack_ids(len(each.values) for each in logprobs),
            logprob_ids=pack_ids(token_id for each in logprobs for token_id in each.token_ids),
            logprobs=pack_floats(value for each in logprobs for value in each.values),
        )


def rows_of(batch: TokenBatch) -> Iterator[TokenRow]:
    """Invert `TokenColumns.batch`; raises ValueError for columns of unequal length."""
    columns = (unpack_ids(batch.attempts), unpack_ids(batch.output_indices), _tokens(batch), batch.finish_reasons)
    return zip(batch.request_ids, *columns, strict=True)


def _tokens(batch: TokenBatch) -> list[OutputToken]:
    token_ids = unpack_ids(batch.token_ids)
    if not isinstance(batch, LogprobBatch):
        return list(map(plain_token, token_ids))
    ids, values = unpack_ids(batch.logprob_ids), unpack_floats(batch.logprobs)
    tokens, begin = [], 0
    for token_id, num in zip(token_ids, unpack_ids(batch.num_logprobs), strict=True):
        end = begin + num
        logprobs = Logprobs(tuple(ids[begin:end]), tuple(values[begin:end])) if num else None
        tokens.append(OutputToken(token_id, logprobs))
        begin = end
    return tokens
