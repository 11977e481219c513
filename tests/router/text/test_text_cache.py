"""What was encoded is not encoded again, as long as there is room, and only for the same salt."""

import json
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.settings.config import ModelSection
from router.placement.capacity import most_tokens
from router.reading.bodies import NUM_FREE_BYTES
from router.text.prompts import MAX_CHARS_PER_TOKEN, Encoding, TokenIds
from router.text.text_cache import TextCache, TextCounts
from router.text.text_cuts import PIECE_CHARS
from router.text.tokenizer import Tokenizer
from tests.router.conftest import StartCluster
from tests.router.made_tokenizers import KINDS, made

SIZE = 1 << 20
LIMIT = 100_000
LINES = [f"The {number}th line, of many.\n" for number in range(1000)]


def ids_of(piece: str) -> TokenIds:
    return array("i", map(ord, piece))


class Encoder:
    """Notes what it is given."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def __call__(self, pieces: list[str]) -> list[TokenIds]:
        self.given += pieces
        return list(map(ids_of, pieces))


def piece(number: int) -> str:
    return f"{number:<{PIECE_CHARS}}"


def test_each_piece_is_encoded_once_and_what_follows_the_last_cut_each_time() -> None:
    cache, encoder = TextCache(SIZE), Encoder()
    a, b, c = map(piece, range(3))
    for pieces, new in (([a, b, a, "end"], [a, b, "end"]), ([a, b, c, "end"], [c, "end"]), ([c, b], [])):
        encoder.given.clear()
        assert cache.ids(pieces, "", encoder) == ids_of("".join(pieces))
        assert encoder.given == new
    assert cache.counts == TextCounts(num_found=5 * PIECE_CHARS, num_encoded=3 * PIECE_CHARS + 6)


def test_nothing_is_found_that_came_with_another_salt() -> None:
    cache, encoder = TextCache(SIZE), Encoder()
    for salt in ("", "a", "b", "a"):
        cache.ids([piece(0)], salt, encoder)
    assert encoder.given == [piece(0)] * 3


@settings(max_examples=100)
@given(texts=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), max_size=30), num_entries=st.integers(0, 8))
def test_those_asked_for_last_are_kept_in_so_many_bytes(texts: list[list[int]], num_entries: int) -> None:
    probe = TextCache(SIZE)
    probe.ids([piece(0)], "", Encoder())
    max_bytes = num_entries * probe.num_bytes
    cache, encoder, last = TextCache(max_bytes), Encoder(), list[int]()
    for numbers in texts:
        encoder.given.clear()
        cache.ids(list(map(piece, numbers)), "", encoder)
        new = [number for number in dict.fromkeys(numbers) if number not in last]
        assert encoder.given == list(map(piece, new))
        for number in [number for number in numbers if number not in new] + new:
            last = [each for each in last if each != number] + [number]
        last = last[-num_entries:] if num_entries else []
        assert cache.num_bytes == len(last) * probe.num_bytes <= max_bytes


def test_what_two_encode_at_once_is_there_once() -> None:
    cache, encoder = TextCache(SIZE), Encoder()
    cache.ids([piece(0)], "", encoder)
    num_bytes = cache.num_bytes

    def encode_behind_another(pieces: list[str]) -> list[TokenIds]:
        cache.ids(pieces, "", encoder)
        return encoder(pieces)

    cache.ids([piece(1)], "", encode_behind_another)
    assert encoder.given == [piece(0), piece(1), piece(1)]
    assert cache.num_bytes == 2 * num_bytes


@pytest.mark.medium
def test_threads_may_share_it() -> None:
    texts = [[piece((start + number) % 40) for number in range(20)] for start in range(40)] * 20
    cache = TextCache(SIZE // 16)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda pieces: cache.ids(pieces, "", Encoder()), texts))
    assert found == [ids_of("".join(pieces)) for pieces in texts]
    assert cache.counts.num_found + cache.counts.num_encoded == sum(map(len, found))
    cache.ids([piece(number) for number in range(100, 200)], "", Encoder())
    assert 0 < cache.num_bytes <= SIZE // 16


@pytest.fixture(scope="module", params=KINDS)
def both(request: Any, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Ours with a cache, and the library's, of one kind."""
    path = tmp_path_factory.mktemp("kinds") / "tiny"
    path.mkdir()
    library = made(request.param)
    library.save(str(path / "tokenizer.json"))
    config = json.loads((model_dir / "config.json").read_text()) | {"vocab_size": library.get_vocab_size()}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_bytes((model_dir / "generation_config.json").read_bytes())
    return Tokenizer(ModelSection(path=str(path)), SIZE), library


@pytest.mark.medium
@settings(max_examples=30)
@given(data=st.data(), special=st.booleans(), salt=st.sampled_from(["", "a"]))
def test_texts_that_begin_alike_have_the_library_s_tokens(
    both: tuple[Tokenizer, Any], data: Any, special: bool, salt: str
) -> None:
    ours, library = both
    num_lines, end = data.draw(st.integers(0, 300)), data.draw(st.text(max_size=20))
    first = data.draw(st.integers(0, 2))
    text = "".join(LINES[first : first + num_lines]) + end + "".join(LINES[:40])
    encoding = Encoding(add_special_tokens=special, salt=salt)
    (ids,) = ours.encode([text], LIMIT, encoding)
    assert ids.tolist() == library.encode(text, add_special_tokens=special).ids


def test_a_text_that_goes_on_is_found(both: tuple[Tokenizer, Any]) -> None:
    ours, _ = both
    text = "".join(LINES)
    ours.encode([text], LIMIT)
    before = ours.text_counts
    (ids,) = ours.encode([text + "And then?"], LIMIT)
    num_found = ours.text_counts.num_found - before.num_found
    assert 0.9 * len(ids) < num_found < len(ids)


@pytest.mark.medium
@pytest.mark.parametrize("keep_end", [True, False])
@pytest.mark.parametrize("special", [True, False])
def test_an_end_of_a_text_is_that_of_the_library_s_tokens(
    both: tuple[Tokenizer, Any], monkeypatch: pytest.MonkeyPatch, keep_end: bool, special: bool
) -> None:
    ours, library = both
    monkeypatch.setattr("router.text.tokenizer.MAX_BATCH", 2)
    text = "".join(LINES[:700])
    plain = library.encode(text, add_special_tokens=False)
    for num_tokens in (2, 17, 999, 5000, len(plain.ids), len(plain.ids) + 9):
        num_chars = MAX_CHARS_PER_TOKEN * num_tokens
        part = library.encode(text[-num_chars:] if keep_end else text[:num_chars], add_special_tokens=False)
        num_special = library.num_special_tokens_to_add(False) if special else 0
        part.truncate(num_tokens - num_special, direction="left" if keep_end else "right")
        expected = library.post_process(part, add_special_tokens=special).ids
        encoding = Encoding(add_special_tokens=special, max_tokens=num_tokens, keep_end=keep_end)
        (ids,) = ours.encode([text], LIMIT, encoding)
        assert ids.tolist() == expected


@pytest.mark.medium
async def test_every_way_to_read_a_text_finds_what_it_has_read(start_cluster: StartCluster) -> None:
    cluster = await start_cluster()
    cluster.decode(transport="none")
    await cluster.until(lambda: most_tokens(cluster.service.pool), "a worker")
    text = "the quick brown fox jumps over the lazy dog; " * (2 + PIECE_CHARS // 45)
    ways = {
        "/v1/completions": {"prompt": text, "max_tokens": 1},
        "/tokenize": {"prompt": text},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
    }
    async with aiohttp.ClientSession(cluster.url) as session:
        for padding in ("", " " * NUM_FREE_BYTES):
            for path, fields in ways.items():
                for _ in range(2):
                    before = cluster.service.reader.text_counts
                    body = padding + json.dumps(fields)
                    async with session.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
                        assert response.status == 200, await response.text()
                counts = cluster.service.reader.text_counts
                assert counts.num_found > before.num_found, (path, len(padding))
                assert counts.num_encoded > before.num_encoded, (path, len(padding))
        async with session.get("/metrics") as response:
            metrics = await response.text()
    assert f'baton_text_tokens_total{{source="cache"}} {float(counts.num_found)}' in metrics
    assert f'baton_text_tokens_total{{source="tokenizer"}} {float(counts.num_encoded)}' in metrics
