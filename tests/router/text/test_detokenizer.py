from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.detokenizer import MAX_PENDING_TOKENS, IncrementalDecoder, TextStream, no_piece, pieces_of
from router.text.stop_strings import MAX_STOP_CHARS, MAX_STOPS, StopAutomaton, StopMatcher

PROPERTY = settings(max_examples=300)
texts = st.text(alphabet=st.sampled_from("aab the köln你好🎉👨\u200d👩\ufffd"), max_size=60)
token_ids = st.lists(st.one_of(st.integers(0, 319), st.sampled_from([0, 1000])), max_size=120)


def with_byte_fallback(name: str) -> tokenizers.Tokenizer:
    """A tokenizer of some characters and 256 bytes, which decodes as Gemma's or as Mistral 7B v0.3's."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581ab\nö", "\u2581a"]
    vocab = {word: token_id for token_id, word in enumerate(words)}
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=[("\u2581", "a")], unk_token="<unk>", byte_fallback=True)
    )
    made.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    parts: list[Any] = [
        tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()
    ]  # fmt: skip
    parts += [tokenizers.decoders.Strip(" ", 1, 0)] * (name == "mistral")
    made.decoder = tokenizers.decoders.Sequence(parts)
    return made


@pytest.fixture(params=["gemma", "mistral"], scope="module")
def bytewise(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return with_byte_fallback(request.param)


class CountingDecode:
    """Decodes with the tokenizer and notes the longest list that it was given."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.longest = self.num_calls = 0
        self._tokenizer = tokenizer

    def __call__(self, ids: Sequence[int]) -> str:
        self.longest, self.num_calls = max(self.longest, len(ids)), self.num_calls + 1
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def chunks_of(decoder: IncrementalDecoder, ids: Sequence[int]) -> list[str]:
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


def first_complete(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Reference: read character by character until some stop string is complete; the text before it, and it."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, ""


def matcher(*stops: str, include: bool = False) -> StopMatcher:
    return StopMatcher(StopAutomaton(stops), include=include)


@pytest.mark.medium
@PROPERTY
@given(ids=token_ids)
def test_chunks_of_any_ids_join_to_the_text_decoded_at_once(tokenizer: tokenizers.Tokenizer, ids: list[int]) -> None:
    decode = CountingDecode(tokenizer)
    assert "".join(chunks_of(IncrementalDecoder(decode), ids)) == decode(ids)


@pytest.mark.medium
@PROPERTY
@given(text=texts, between=token_ids)
def test_remembered_pieces_join_to_the_text_decoded_at_once(
    tokenizer: tokenizers.Tokenizer, text: str, between: list[int]
) -> None:
    ids = [*tokenizer.encode(text).ids, *between, *tokenizer.encode(text).ids]
    chunks = chunks_of(IncrementalDecoder(tokenizer.decode, pieces_of(tokenizer, tokenizer.decode)), ids)
    assert "".join(chunks) == tokenizer.decode(ids)


@pytest.mark.medium
@PROPERTY
@given(ids=st.lists(st.one_of(st.integers(255, 263), st.integers(0, 300)), max_size=60))
def test_remembered_pieces_join_beside_bytes_decoded_as_a_whole(bytewise: tokenizers.Tokenizer, ids: list[int]) -> None:
    pieces = pieces_of(bytewise, bytewise.decode)
    without, with_pieces = (IncrementalDecoder(bytewise.decode, piece) for piece in (no_piece, pieces))
    assert chunks_of(with_pieces, ids) == chunks_of(without, ids)


def test_a_remembered_piece_is_not_decoded_again(tokenizer: tokenizers.Tokenizer) -> None:
    decode = CountingDecode(tokenizer)
    decoder = IncrementalDecoder(decode, pieces_of(tokenizer, decode))
    ids = tokenizer.encode("the cat and the cat and the").ids
    chunks = [decoder.push(token_id) for token_id in ids]
    num_before = decode.num_calls
    assert [decoder.push(token_id) for token_id in ids[1:]] == chunks[1:]
    assert decode.num_calls == num_before


@pytest.mark.parametrize("decoder", [None, tokenizers.decoders.WordPiece(), tokenizers.decoders.Metaspace()])
def test_a_decoder_that_may_look_at_neighbours_has_no_pieces(decoder: Any) -> None:
    made = with_byte_fallback("gemma")
    made.decoder = decoder
    assert pieces_of(made, made.decode)(made.get_vocab()["a"]) is None


@PROPERTY
@given(text=texts)
def test_no_chunk_of_valid_text_has_half_a_character(tokenizer: tokenizers.Tokenizer, text: str) -> None:
    decoder = IncrementalDecoder(CountingDecode(tokenizer))
    shown = "".join(decoder.push(token_id) for token_id in tokenizer.encode(text).ids)
    assert text.startswith(shown)
    assert shown + decoder.flush() == text


@PROPERTY
@given(text=st.text(alphabet=st.sampled_from("aab the köln日本語🎉👨\u200d👩"), max_size=60))
def test_no_chunk_has_half_a_character_of_bytes_decoded_as_a_whole(bytewise: tokenizers.Tokenizer, text: str) -> None:
    decode = CountingDecode(bytewise)
    ids = bytewise.encode(text, add_special_tokens=False).ids
    decoder, shown, whole = IncrementalDecoder(decode), "", decode(ids)
    for token_id in ids:
        shown += decoder.push(token_id)
        assert whole.startswith(shown)
    assert shown == whole, "characters come with their last byte"


def test_a_stop_string_is_found_in_bytes_decoded_as_a_whole(bytewise: tokenizers.Tokenizer) -> None:
    stream = TextStream(CountingDecode(bytewise), matcher("語b"))
    pieces = []
    for token_id in bytewise.encode("日本語bb", add_special_tokens=False).ids:
        pieces.append(stream.push(token_id))
        if stream.stop:
            break
    assert [piece for piece in pieces if piece] == ["日", "本"] and stream.stop == "語b"


@pytest.mark.parametrize("byte", [0x85, 0xF0])
def test_the_window_stays_short_through_endless_bytes_decoded_as_a_whole(
    bytewise: tokenizers.Tokenizer, byte: int
) -> None:
    decode = CountingDecode(bytewise)
    ids = [*bytewise.encode("ab").ids, *[byte + 1] * 400, *bytewise.encode("ab").ids]
    chunks = chunks_of(IncrementalDecoder(decode), ids)
    assert decode.longest <= 2 * MAX_PENDING_TOKENS
    assert "".join(chunks) == decode(ids) and any(chunks[100:200])


def test_an_invalid_byte_takes_no_character_back(bytewise: tokenizers.Tokenizer) -> None:
    ids = [*bytewise.encode("日本").ids, 0x85 + 1, *bytewise.encode("a日").ids]
    text = "".join(chunks_of(IncrementalDecoder(CountingDecode(bytewise)), ids))
    assert text.startswith("日本\ufffd") and text.endswith("\ufffda日")


@pytest.mark.parametrize("name", ["special", "invalid byte", "start of a character", "unknown id"])
def test_the_window_stays_short_through_endless_invisible_tokens(tokenizer: tokenizers.Tokenizer, name: str) -> None:
    byte = {"special": "<|endoftext|>", "invalid byte": "ħ", "start of a character": "ð"}  # 0x85, 0xF0 in byte-level
    token_id = 1000 if name == "unknown id" else tokenizer.get_vocab()[byte[name]]
    decode = CountingDecode(tokenizer)
    ids = [*tokenizer.encode("the fox").ids, *[token_id] * 400, *tokenizer.encode(" jumps").ids]
    chunks = chunks_of(IncrementalDecoder(decode), ids)
    assert decode.longest <= 2 * MAX_PENDING_TOKENS
    assert "".join(chunks) == decode(ids)


@pytest.mark.medium
@PROPERTY
@given(
    chunks=st.lists(st.text("abc", max_size=6), max_size=8),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=8),
    include=st.booleans(),
)
def test_stop_strings_cut_the_same_text_however_it_is_chunked(
    chunks: list[str], stops: list[str], include: bool
) -> None:
    cutter = matcher(*stops, include=include)
    before, stop = first_complete("".join(chunks), stops)
    expected = before + stop if include else before
    shown = ""
    for chunk in chunks:
        shown += cutter.feed(chunk)
        assert expected.startswith(shown)
        if cutter.found:
            break
    assert shown + cutter.flush() == expected
    assert cutter.found == stop


@pytest.mark.medium
@PROPERTY
@given(text=texts, stops=st.lists(st.sampled_from(["ö", "a", "好🎉", "the", " k", "\ufffd"]), max_size=3))
def test_stream_is_the_text_before_the_first_stop(tokenizer: tokenizers.Tokenizer, text: str, stops: list[str]) -> None:
    stream = TextStream(CountingDecode(tokenizer), matcher(*stops) if stops else None, prefix="before ")
    shown = ""
    for token_id in tokenizer.encode(text).ids:
        shown += stream.push(token_id)
        if stream.stop:
            break
    shown += "" if stream.stop else stream.flush()
    before, stop = first_complete(text, stops)
    assert (shown, stream.stop) == ("before " + before, stop)


@pytest.mark.parametrize("min_tokens", range(8))
def test_no_stop_string_is_looked_for_in_the_first_tokens(tokenizer: tokenizers.Tokenizer, min_tokens: int) -> None:
    ids = tokenizer.encode("the cat, the dog, the end").ids
    text, exempt = tokenizer.decode(ids), tokenizer.decode(ids[:min_tokens])
    stream, shown = TextStream(tokenizer.decode, matcher("the"), min_tokens=min_tokens), ""
    for token_id in ids:
        shown += stream.push(token_id)
        if stream.stop:
            break
    before, stop = first_complete(text[len(exempt) :], ["the"])
    assert (shown + ("" if stream.stop else stream.flush()), stream.stop) == (exempt + before, stop)


def test_withheld_start_of_a_stop_string_is_shown_when_it_was_none() -> None:
    cutter = matcher("stop!")
    assert cutter.feed("do not sto") == "do not "
    assert cutter.feed("re") == "store"
    assert cutter.feed(" st") == " "
    assert cutter.flush() == "st"


def test_a_character_costs_the_same_however_many_stop_strings_it_may_begin() -> None:
    half = MAX_STOP_CHARS // MAX_STOPS
    automaton = StopAutomaton(["a" * (half - 2) + chr(0x100 + n) for n in range(MAX_STOPS)])
    looked_up = 0

    class Counted(dict[int, int]):
        def get(self, key: int, default: Any = None) -> Any:
            nonlocal looked_up
            looked_up += 1
            return super().get(key, default)

    automaton._next = Counted(automaton._next)
    cutter = StopMatcher(automaton)
    for _ in range(1000):
        cutter.feed("aab")
    assert looked_up <= 2 * 3000
