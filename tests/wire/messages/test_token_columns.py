"""Tokens come out of the columns of a message as they were put in, and what nobody asked for takes no room in it."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.wire.messages.frames import decode, encode
from common.wire.messages.token_columns import TokenColumns, TokenRow, rows_of
from common.wire.messages.worker import FinishReason, LogprobBatch, TokenBatch
from common.wire.values.output_token import MAX_LOGPROBS, Logprobs, OutputToken

IDS = st.integers(0, 2**31 - 1)
VALUES = st.floats(max_value=0.0, allow_nan=False, width=32)
SCORED = st.lists(st.tuples(IDS, VALUES), min_size=1, max_size=MAX_LOGPROBS + 1).map(
    lambda pairs: Logprobs(*map(tuple, zip(*pairs, strict=True)))
)
TOKENS = st.builds(OutputToken, IDS, st.none() | SCORED)
ROWS = st.lists(st.tuples(st.sampled_from("abc"), IDS, IDS, TOKENS, st.sampled_from(FinishReason)))


def sent(rows: list[TokenRow]) -> bytes:
    columns = TokenColumns()
    for request_id, attempt, output_index, token, reason in rows:
        columns.add(request_id, attempt, output_index, token, FinishReason(reason))
    return encode(columns.batch("d", 1))


@pytest.mark.medium
@given(ROWS)
def test_rows_survive_the_wire(rows: list[TokenRow]) -> None:
    message = decode(sent(rows))
    assert isinstance(message, TokenBatch)
    assert list(rows_of(message)) == rows
    assert isinstance(message, LogprobBatch) == any(token.logprobs is not None for *_, token, _ in rows)


def test_numbers_are_those_of_fp32() -> None:
    [tenth] = struct.unpack("f", struct.pack("f", -0.1))
    message = decode(sent([("a", 0, 0, OutputToken(1, Logprobs((1,), (-0.1,))), 0)]))
    assert isinstance(message, LogprobBatch)
    assert [token.logprobs for *_, token, _ in rows_of(message)] == [Logprobs((1,), (tenth,))]
