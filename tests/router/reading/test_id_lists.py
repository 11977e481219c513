"""Lists of ids that are taken out of JSON before it is parsed: whatever a text is, it means what json says."""

import itertools
import json
import random
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.base.errors import RequestError
from router.reading import id_lists
from router.reading.id_lists import LEAST_CHARS, MAX_BRACKETS, ids_of, part
from router.reading.json_body import CHUNK_CHARS, values_of
from router.reading.reading import MAX_IDS_BYTES, MAX_REST_CHARS, _loads, parse_body, parse_ids
from router.text.model_info import ModelInfo

INFO = ModelInfo("tiny", "", "", vocab_size=151_936, max_model_len=40_960, eos_token_ids=(1,))
NUMBERS = ("0", "1", "23", "151935", "2147483647")
STRANGE = (
    "-1", "1.0", "1e3", "007", "00", "+1", "true", "null", "2147483648", "9" * 30, "", '"a"', "[1]", "\u0663", "1_0",
    "NaN", "0x1", "1 2", "{}", "\u00a01", "\x0b1",
)  # fmt: skip
RESTS = ("", ',"seed":1', ',"n":0', ',"model":"big"', ',"stop_token_ids":[3,4],"max_tokens":7', ',"prompt":[]')
BETWEEN = (",", ", ", " ,\n", ",\r\n\t", "\n,")
STRANGE_BETWEEN = ("", " ", ",,", ";", ",\x0c", ":", "]", "[")
FORMS = (
    '{"prompt":%s}', '{"prompt" : [ %s , %s ] }', '{"prompt":"%s"}', '{"a":%s,"prompt":%s}', '{"prompt":%s%s}',
    '{"prompt":%s,"prompt":%s}', "%s", '{"prompt":{"x":%s}}', '{"stop":"[\\"%s","prompt":%s}', "{%s:1}",
    '{"prompt":[%s', '{"prompt":-%s}', '{"prompt":%s5}', '{"prompt":5%s}', '{"user":"\\\\","prompt":%s}',
    '{"prompt":[%s,"text",%s]}', '{"prompt":[[%s]]}', '{"prompt":0.%s}', '{"prompt":%s,"stop_token_ids":%s}',
    '{"temperature":0.5,"prompt":%s}', '{"user":"é\\ud83d","prompt":%s}', '["prompt",%s]', '{"prompt":%s}}', '"%s',
    '{"prompt":[1,%s,2]}', '\ufeff{"prompt":%s}', '{"prompt":%s, "logit_bias": {"5": 1.25}}',
)  # fmt: skip


def mostly(usual: tuple[str, ...], strange: tuple[str, ...]) -> st.SearchStrategy[str]:
    return st.integers(0, 60).flatmap(lambda n: st.sampled_from(usual if n else strange))


def as_list(begin: str, items: list[tuple[str, str]], end: str) -> str:
    return begin + "".join(piece for item in items for piece in item).rstrip(", \r\n\t") + end


LISTS = st.builds(
    as_list,
    st.sampled_from(("[", "[ ")),
    st.lists(st.tuples(mostly(NUMBERS, STRANGE), mostly(BETWEEN, STRANGE_BETWEEN)), max_size=8),
    st.sampled_from(("]", "\n]")),
)
"""The text of one, mostly of ids, mostly well-formed."""


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Also with a character lost, or too many."""
    form = draw(st.sampled_from(FORMS))
    text = form % tuple(draw(LISTS) for _ in range(form.count("%s")))
    if draw(st.booleans()):
        place = draw(st.integers(0, len(text)))
        text = text[:place] + draw(st.sampled_from(("", '"', "]", "\\", "0"))) + text[place + 1 :]
    return text.encode(draw(st.sampled_from(("utf-8", "utf-8", "utf-16"))))


def outcome(read: Any, *args: Any) -> Any:
    """What it gives, as JSON, which tells 1 from 1.0 and true; or the error."""
    try:
        return json.dumps(read(*args), default=lambda value: value.tolist())
    except RequestError as error:
        return vars(error)


@pytest.mark.medium
@settings(max_examples=1000)
@given(data=bodies())
def test_a_text_means_what_json_says(data: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(id_lists, "LEAST_CHARS", 2)
        patch.setattr(id_lists, "CHUNK_CHARS", 3)
        assert outcome(values_of, data, _loads) == outcome(values_of, data)


def plain(data: bytes) -> Any:
    """As it was read if nothing were taken out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(id_lists, "MAX_BRACKETS", 0)
        return parse_body(data, INFO)


@pytest.mark.medium
@settings(max_examples=300)
@given(data=bodies(), rest=st.sampled_from(RESTS))
def test_a_request_is_the_same_request_or_the_same_error(data: bytes, rest: str) -> None:
    data = data.replace(b"}", b"%s}" % rest.encode(), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(id_lists, "LEAST_CHARS", 2)
        patch.setattr("secrets.randbits", lambda bits: 5)
        expected = outcome(lambda: repr(plain(data)))
        assert outcome(lambda: repr(parse_body(data, INFO))) == expected
        assert outcome(lambda: repr(parse_ids(data, INFO))) in (expected, json.dumps("None"))


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (",\n  ", ": ")])
def test_long_prompts_of_ids_are_arrays(separators: tuple[str, str]) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(INFO.vocab_size) for _ in range(count)] for count in (5000, 1, 3000, 700)]
    for prompt in (prompts, prompts[0], ["text", *prompts]):
        body = {"user": 'a [ 1, 2 ] \\ " [', "prompt": prompt, "logit_bias": {"3": 0.25}, "stop": ["]"]}
        data = json.dumps(body, separators=separators).encode()
        parted = part(data.decode())
        assert len(parted.rest) < 600 and len(parted.lists) == (3 if isinstance(prompt[0], list | str) else 1)
        request = parse_ids(data, INFO)
        assert request is not None
        several = prompt if isinstance(prompt[0], list | str) else [prompt]
        assert [each if isinstance(each, str) else each.tolist() for each in request.prompts] == several
        assert [type(each) for each in plain(data).prompts] == [type(each) for each in request.prompts]


def test_what_may_be_long_to_read_is_not_for_the_event_loop() -> None:
    ids = ",".join(["1"] * 500)
    assert parse_ids(f'{{"prompt":[{ids}]}}'.encode(), INFO) is not None
    for text in (
        f'{{"prompt":[{ids}],"user":"{"a" * MAX_REST_CHARS}"}}',
        f'{{"prompt":[{ids}],"user":"ü"}}',
        f'{{"prompt":[{ids}]',
        f'{{"stop_token_ids":[{ids}],"prompt":[1]}}',
        '{"prompt":[' + ",".join(f"[{ids}]" for _ in range(MAX_BRACKETS)) + "]}",
        '{"prompt":[' + ids.replace("1", "-1") + "]}",
        "[" * MAX_IDS_BYTES,
        '{"prompt":"' + "[1" * 1000 + ids,
    ):
        assert parse_ids(text.encode(), INFO) is None


@pytest.mark.parametrize("number", ["-1", "2147483648", "1.5", "true", "01", "1e400", '"1"'])
def test_what_is_no_id_is_named_as_ever(number: str) -> None:
    data = ('{"prompt":[' + "7," * LEAST_CHARS + number + "]}").encode()
    assert outcome(parse_body, data, INFO) == outcome(plain, data) != json.dumps(None)


def test_ids_of_what_is_between_brackets() -> None:
    assert ids_of("[ 1,\t20,\r300 ]", 1, 13).tolist() == [1, 20, 300]  # type: ignore[union-attr]
    assert ids_of("5" + ",0" * CHUNK_CHARS, 0, 1 + 2 * CHUNK_CHARS) == array("i", [5]) + array("i", [0]) * CHUNK_CHARS
    for length in range(1, 8):
        for chars in itertools.product("01, ", repeat=length):
            text = "".join(chars)
            expected = listed(text)
            found = ids_of(text, 0, length)
            assert (found is None) if expected is None else (found is None or found.tolist() == expected), text
            assert found is not None or expected is None or " ," in text, "what is usual is read"


def listed(text: str) -> list[int] | None:
    """As json has it; None for what it does not take, and no ids."""
    try:
        return json.loads(f"[{text}]") or None
    except ValueError:
        return None
