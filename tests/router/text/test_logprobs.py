"""Names of tokens do not lie about bytes, and numbers survive JSON."""

import json
import math
from collections.abc import Sequence

import pytest

from common.wire.values.output_token import Logprobs, OutputToken
from router.text.logprobs import LEAST, LogprobLog, TokenStrings
from tests.router.text.test_detokenizer import with_byte_fallback


class Words:
    """A vocabulary of a few tokens of several notations."""

    written = ("Ġthe", "end", "ä½", "ł", "<0xE4>", "\u2581word", None, "é", "<eos>")
    pieces = (b" the", b"end", b"\xe4\xbd", b"\xa0", b"\xe4", b"word", b"", "é".encode(), b"<eos>")

    def strings(self, ids: Sequence[int]) -> list[str | None]:
        return [self.written[token_id] for token_id in ids]

    def decode_all(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[token_id] for token_id in ids).decode(errors="replace")


@pytest.mark.parametrize(
    ("token_id", "name"),
    [
        (0, " the"),
        (1, "end"),
        (2, "bytes:\\xe4\\xbd"),
        (3, "bytes:\\xa0"),
        (4, "bytes:\\xe4"),
        (5, " word"),
        (6, "token_id:6"),
        (7, "é"),
        (8, "<eos>"),
    ],
)
def test_a_token_is_called_by_its_text_or_its_bytes(token_id: int, name: str) -> None:
    strings = TokenStrings(Words())
    assert [strings.of(token_id), strings.of(token_id)] == [name, name]
    assert TokenStrings(Words(), as_ids=True).of(token_id) == f"token_id:{token_id}"


class BytewiseWords:
    """A vocabulary with byte fallback."""

    tokenizer = with_byte_fallback("gemma")

    def strings(self, ids: Sequence[int]) -> list[str | None]:
        return [self.tokenizer.id_to_token(token_id) for token_id in ids]

    def decode_all(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids)))


def test_offsets_are_places_of_characters_whose_bytes_are_decoded_as_a_whole() -> None:
    words = BytewiseWords()
    log = LogprobLog(TokenStrings(words), words.decode_all, 2)
    for token_id in words.tokenizer.encode("日本a語b").ids:
        log.push(OutputToken(token_id, Logprobs((token_id,), (-0.5,))))
    part = log.part(0, 99)
    assert part["text_offset"] == [2, 2, 2, 3, 3, 3, 4, 5, 5, 5, 6]
    assert part["tokens"][2:8] == [
        "bytes:\\xa5", "bytes:\\xe6", "bytes:\\x9c", "bytes:\\xac", "a", "bytes:\\xe8"
    ]  # fmt: skip


def test_parts_tell_of_each_token_once_and_where_its_text_begins() -> None:
    log = LogprobLog(TokenStrings(Words()), Words().decode_all)
    for token_id in (0, 2, 3, 1):
        log.push(OutputToken(token_id, Logprobs((token_id, 1, 8), (-0.5, -0.25, -math.inf))))
    log.push(OutputToken(8, Logprobs((8,), (-math.inf,))))
    parts = [log.part(0, 1), log.part(1, 1), log.part(1, 5)]
    assert parts[1] == {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    assert [name for part in parts for name in part["tokens"]] == [
        " the",
        "bytes:\\xe4\\xbd",
        "bytes:\\xa0",
        "end",
        "<eos>",
    ]
    assert [offset for part in parts for offset in part["text_offset"]] == [0, 4, 4, 5, 8]
    assert parts[0]["top_logprobs"] == [{" the": -0.5, "end": -0.25, "<eos>": LEAST}]
    assert parts[2]["top_logprobs"][2:] == [{"end": -0.5, "<eos>": LEAST}, {"<eos>": LEAST}]
    assert json.loads(json.dumps(parts)) == parts
