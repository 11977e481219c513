from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.detokenizer import MAX_PENDING_TOKENS, IncrementalDecoder, StopMatcher, TextStream

PROPERTY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
texts = st.text(alphabet=st.sampled_from("aab the köln你好🎉👨\u200d👩\ufffd"), max_size=60)
token_ids = st.lists(st.one_of(st.integers(0, 319), st.sampled_from([0, 1000])), max_size=120)


class CountingDecode:
    """Decodes with the tokenizer and notes the longest list that it was given."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.longest = 0
        self._tokenizer = tokenizer

    def __call__(self, ids: Sequence[int]) -> str:
        self.longest = max(self.longest, len(ids))
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def chunks_of(decoder: IncrementalDecoder, ids: Sequence[int]) -> list[str]:
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


def first_complete(text: str, stops: Sequence[str]) -> str:
    """Reference: read character by character until some stop string is complete."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@PROPERTY
@given(ids=token_ids)
def test_chunks_of_any_ids_join_to_the_text_decoded_at_once(tokenizer: tokenizers.Tokenizer, ids: list[int]) -> None:
    decode = CountingDecode(tokenizer)
    assert "".join(chunks_of(IncrementalDecoder(decode), ids)) == decode(ids)


@PROPERTY
@given(text=texts)
def test_no_chunk_of_valid_text_has_half_a_character(tokenizer: tokenizers.Tokenizer, text: str) -> None:
    decoder = IncrementalDecoder(CountingDecode(tokenizer))
    shown = "".join(decoder.push(token_id) for token_id in tokenizer.encode(text).ids)
    assert text.startswith(shown)
    assert shown + decoder.flush() == text


@pytest.mark.parametrize("name", ["special", "invalid byte", "start of a character", "unknown id"])
def test_the_window_stays_short_through_endless_invisible_tokens(tokenizer: tokenizers.Tokenizer, name: str) -> None:
    byte = {"special": "<|endoftext|>", "invalid byte": "ħ", "start of a character": "ð"}  # 0x85, 0xF0 in byte-level
    token_id = 1000 if name == "unknown id" else tokenizer.get_vocab()[byte[name]]
    decode = CountingDecode(tokenizer)
    ids = [*tokenizer.encode("the fox").ids, *[token_id] * 400, *tokenizer.encode(" jumps").ids]
    chunks = chunks_of(IncrementalDecoder(decode), ids)
    assert decode.longest <= 2 * MAX_PENDING_TOKENS
    assert "".join(chunks) == decode(ids)


@PROPERTY
@given(
    chunks=st.lists(st.text("abc", max_size=6), max_size=8),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_stop_strings_cut_the_same_text_however_it_is_chunked(chunks: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    expected = first_complete("".join(chunks), stops)
    shown = ""
    for chunk in chunks:
        shown += matcher.feed(chunk)
        assert expected.startswith(shown)
        if matcher.stopped:
            break
    assert shown + ("" if matcher.stopped else matcher.flush()) == expected
    assert matcher.stopped == (expected != "".join(chunks))


@PROPERTY
@given(text=texts, stops=st.lists(st.sampled_from(["ö", "a", "好🎉", "the", " k", "\ufffd"]), max_size=3))
def test_stream_is_the_text_before_the_first_stop(tokenizer: tokenizers.Tokenizer, text: str, stops: list[str]) -> None:
    stream = TextStream(CountingDecode(tokenizer), stops)
    shown = ""
    for token_id in tokenizer.encode(text).ids:
        shown += stream.push(token_id)
        if stream.stopped:
            break
    shown += "" if stream.stopped else stream.flush()
    assert shown == first_complete(text, stops)


def test_withheld_start_of_a_stop_string_is_shown_when_it_was_none() -> None:
    matcher = StopMatcher(["stop!"])
    assert matcher.feed("do not sto") == "do not "
    assert matcher.feed("re") == "store"
    assert matcher.feed(" st") == " "
    assert matcher.flush() == "st"
