"""A body read in another process is the same request, and what cannot fit is refused before it is encoded."""

import asyncio
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import ModelSection
from common.errors import RequestError
from router.reading import parse_body, read, unpack
from router.tokenizer import MAX_CHARS_PER_TOKEN, PIECE_CHARS, USUAL_CHARS_PER_TOKEN, Tokenizer
from tests.router.conftest import MAX_MODEL_LEN
from tests.router.test_openai_api import ACCEPTED, REJECTED

LIMIT = 1000
WRONG = [fields for _, fields in REJECTED if "[100]" not in str(fields)]  # 100 is a token here
BROKEN = (b"", b"{", b"[" * 100_000, b"\xff", b"[]")


@pytest.fixture(scope="module")
def ours(model_dir: Path) -> Tokenizer:
    return Tokenizer(ModelSection(path=str(model_dir)))


def body(fields: dict[str, Any]) -> bytes:
    return json.dumps({"prompt": "hi", "seed": 1} | fields).encode()


@pytest.mark.parametrize("fields", [*ACCEPTED, {"prompt": "schöne Grüße", "n": 2, "stop": ["a", "b"], "stream": True}])
def test_a_packed_request_is_the_request(ours: Tokenizer, fields: dict[str, Any]) -> None:
    data = body(fields | ({"seed": 1} if fields.get("seed") is None else {}))
    request = parse_body(data, ours.info)
    packed = unpack(read(bytearray(data), ours, LIMIT))
    assert packed.prompts == ours.encode(request.prompts, LIMIT)
    for name in ("sampling", "n", "stops", "stream", "include_usage"):
        assert getattr(packed, name) == getattr(request, name)


@pytest.mark.parametrize("data", [*(body(fields) for fields in WRONG), *BROKEN])
def test_a_packed_error_is_the_error(ours: Tokenizer, data: bytes) -> None:
    with pytest.raises(RequestError) as here:
        ours.encode(parse_body(data, ours.info).prompts, LIMIT)
    with pytest.raises(RequestError) as there:
        unpack(read(bytearray(data), ours, LIMIT))
    assert vars(here.value) == vars(there.value)


class Counting:
    """The library's tokenizer, which notes how many characters it was given."""

    def __init__(self, inner: Any) -> None:
        self.num_chars = 0
        self._inner = inner

    def encode_batch_fast(self, texts: Sequence[str], **options: Any) -> Any:
        self.num_chars += sum(map(len, texts))
        return self._inner.encode_batch_fast(texts, **options)


@pytest.mark.parametrize(
    ("text", "most_chars"),
    [
        ("x" * (MAX_CHARS_PER_TOKEN * LIMIT + 1), 0),
        ("kxq " * 1_000_000, 0),
        ("kxq " * (4 * LIMIT), PIECE_CHARS),
    ],
    ids=["one word", "many words", "words"],
)
def test_what_is_surely_too_long_is_refused_before_it_is_encoded(
    ours: Tokenizer, monkeypatch: pytest.MonkeyPatch, text: str, most_chars: int
) -> None:
    counting = Counting(ours._tokenizer)
    monkeypatch.setattr(ours, "_tokenizer", counting)
    with pytest.raises(RequestError, match=f"at most {LIMIT - 1} tokens"):
        ours.encode([text], LIMIT)
    assert counting.num_chars <= most_chars


def test_ids_that_are_too_many_are_refused_where_they_are_read(ours: Tokenizer) -> None:
    with pytest.raises(RequestError, match=f"the prompt has {LIMIT} tokens"):
        ours.encode([array("i", [1]) * LIMIT], LIMIT)


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("the quick brown fox jumps\n  köln你好🎉"), min_size=1, max_size=400))
def test_what_fits_is_encoded_as_the_library_does(model_dir: Path, text: str) -> None:
    ours = Tokenizer(ModelSection(path=str(model_dir)))
    ids = ours._tokenizer.encode(text * 8).ids
    (found,) = ours.encode([text * 8], len(ids) + 1)
    assert found.tolist() == ids


def test_a_text_of_long_tokens_that_fits_is_let_through() -> None:
    demo = Tokenizer(ModelSection())
    text = max((demo.decode([i]) for i in range(demo.info.vocab_size)), key=len) * PIECE_CHARS
    num_tokens = len(demo._tokenizer.encode(text).ids)
    assert USUAL_CHARS_PER_TOKEN < len(text) / num_tokens < MAX_CHARS_PER_TOKEN
    (found,) = demo.encode([text], num_tokens)
    assert len(found) == num_tokens


async def test_the_loop_turns_while_a_thread_encodes(ours: Tokenizer) -> None:
    text = "the quick brown fox; " * 50_000
    encoding = asyncio.create_task(asyncio.to_thread(ours.encode, [text], len(text)))
    num_turns = 0
    while not encoding.done():
        num_turns += 1
        await asyncio.sleep(0)
    assert len(encoding.result()[0]) > MAX_MODEL_LEN
    assert num_turns > 2000
