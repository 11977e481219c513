"""A body read in another process is the same request, and what cannot fit is refused before it is encoded."""

import asyncio
import json
import shutil
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from common.base.errors import RequestError
from common.settings.config import ModelSection
from router.reading.json_body import MAX_VALUES
from router.reading.packed_requests import unpack
from router.reading.reading import MAX_REPEATED_TOKENS, parse_body, read, tokenized
from router.text.prompts import MAX_CHARS_PER_TOKEN, Encoding
from router.text.tokenizer import PIECE_CHARS, USUAL_CHARS_PER_TOKEN, Tokenizer
from tests.router.conftest import MAX_MODEL_LEN
from tests.router.requests.test_completion_api import ACCEPTED, REJECTED

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
    assert unpack(read(bytearray(data), ours, LIMIT)) == tokenized(request, ours, LIMIT)


@pytest.mark.medium
@pytest.mark.parametrize("data", [*(body(fields) for fields in WRONG), *BROKEN])
def test_a_packed_error_is_the_error(ours: Tokenizer, data: bytes) -> None:
    with pytest.raises(RequestError) as here:
        tokenized(parse_body(data, ours.info), ours, LIMIT)
    with pytest.raises(RequestError) as there:
        unpack(read(bytearray(data), ours, LIMIT))
    assert vars(here.value) == vars(there.value)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b'{"prompt":[[]' + b",[]" * MAX_VALUES + b"]}", "request_too_large"),
        (b"{" + b",".join(b'"%d":1' % number for number in range(MAX_VALUES)) + b"}", "request_too_large"),
        (b"[" * 2 * MAX_VALUES, "request_too_large"),
        (b'{"prompt":["a","' + b"[,:" * MAX_VALUES + b'\\""]}', "context_length_exceeded"),
        (b'{"prompt":"' + b"[,:" * MAX_VALUES, "invalid_json"),
        (b'{"prompt":[' + b"1," * MAX_VALUES + b"1]}", "context_length_exceeded"),
        (b'{"prompt":[' + b"1," * MAX_VALUES + b"-1]}", "request_too_large"),
    ],
    ids=["lists", "keys", "depth", "text", "no end", "ids", "no ids"],
)
def test_too_many_values_are_refused_before_they_are_made(ours: Tokenizer, data: bytes, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        unpack(read(bytearray(data), ours, LIMIT))
    assert caught.value.code == code
    assert code != "request_too_large" or "holds too many values" in caught.value.message


class Counting:
    """The library's tokenizer, which notes how many characters it was given."""

    def __init__(self, inner: Any) -> None:
        self.num_chars = 0
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

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


@pytest.mark.medium
@settings(max_examples=100)
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


@pytest.fixture(scope="module")
def with_bos(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that puts token 0 before each text."""
    path = tmp_path_factory.mktemp("bos") / "tiny"
    shutil.copytree(model_dir, path)
    inner = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    inner.post_processor = tokenizers.processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    inner.save(str(path / "tokenizer.json"))
    return Tokenizer(ModelSection(path=str(path)))


@settings(max_examples=50)
@given(text=st.text(st.sampled_from("the quick brown fox\n  köln🎉"), min_size=1, max_size=200), kept=st.integers(2, 9))
def test_a_truncated_prompt_keeps_one_end_and_what_stands_around_it(with_bos: Tokenizer, text: str, kept: int) -> None:
    whole = with_bos._tokenizer.encode(text).ids
    for side, ids in (("left", [0, *whole[1:][-(kept - 1) :]]), ("right", whole[:kept])):
        fields = {"prompt": text, "truncate_prompt_tokens": kept, "truncation_side": side}
        request = tokenized(parse_body(body(fields), with_bos.info), with_bos, LIMIT)
        assert [list(prompt) for prompt in request.prompts] == [ids]
    bare = with_bos.encode([text], LIMIT, Encoding(add_special_tokens=False))
    assert bare[0].tolist() == whole[1:]


def test_truncation_leaves_room_for_the_output_and_bounds_the_work(
    with_bos: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "the quick brown fox " * 100_000
    counting = Counting(with_bos._tokenizer)
    monkeypatch.setattr(with_bos, "_tokenizer", counting)
    for prompt in (long, [7] * 100_000):
        request = parse_body(body({"prompt": prompt, "truncate_prompt_tokens": -1, "max_tokens": 30}), with_bos.info)
        (kept,) = tokenized(request, with_bos, LIMIT).prompts
        assert len(kept) == LIMIT - 30
    assert counting.num_chars <= MAX_CHARS_PER_TOKEN * LIMIT
    for number, why in ((1, "more than the 1 tokens"), (LIMIT, f"at most {LIMIT - 1}")):
        request = parse_body(body({"truncate_prompt_tokens": number}), with_bos.info)
        with pytest.raises(RequestError, match=why) as caught:
            tokenized(request, with_bos, LIMIT)
        assert caught.value.param == "truncate_prompt_tokens"


@pytest.mark.parametrize("name", ["echo", "return_token_ids"])
def test_what_repeats_very_much_of_prompts_is_refused_before_it_is_made(ours: Tokenizer, name: str) -> None:
    limit = MAX_REPEATED_TOKENS // 128
    for num_tokens in (limit, limit + 1):
        request = parse_body(body({"prompt": [[1] * num_tokens], "n": 128, name: True}), ours.info)
        if num_tokens == limit:
            tokenized(request, ours, 2 * limit)
        else:
            with pytest.raises(RequestError, match=f"{name} repeats {128 * num_tokens} prompt tokens") as caught:
                tokenized(request, ours, 2 * limit)
            assert caught.value.param == name


@pytest.mark.medium
async def test_the_loop_turns_while_a_thread_encodes(ours: Tokenizer) -> None:
    text = "".join(f"the quick brown fox {number}; " for number in range(50_000))
    encoding = asyncio.create_task(asyncio.to_thread(ours.encode, [text], len(text)))
    num_turns = 0
    while not encoding.done():
        num_turns += 1
        await asyncio.sleep(0)
    assert len(encoding.result()[0]) > MAX_MODEL_LEN
    assert num_turns > 2000
