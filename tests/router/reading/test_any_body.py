"""Whatever a client sends is a request, or an error that names what is wrong, wherever it is read."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.base.errors import RequestError
from common.settings.config import ModelSection
from common.wire.messages.frames import decode, encode
from router.http.errors import error_body
from router.reading.packed_requests import unpack
from router.reading.reading import parse_body, read, tokenized
from router.requests.completion_fields import COMPLETION_FIELDS, STREAM_OPTIONS
from router.text.tokenizer import Tokenizer
from tests.support.messages import prefill_request

LIMIT = 100
NUMBERS = [0, 1, -1, 2, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**400, 1.0, 0.5, 2.5, 1e308, -0.0]
TEXTS = ["", "hi", "stop", "left", "\ud800", "a/b", "\0", "x" * 2000]
numbers = st.one_of(st.integers(-3, 130), st.sampled_from(NUMBERS))
texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=5))
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
names = st.one_of(st.sampled_from([*COMPLETION_FIELDS.fields, *STREAM_OPTIONS.fields, "max_token"]), texts)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=3), max_leaves=8
)
likely = st.fixed_dictionaries(
    {"prompt": st.sampled_from(["hi", "the quick brown fox", [1, 2], [[3], "a"]])},
    optional={
        "max_tokens": st.integers(0, 110),
        "n": st.integers(1, 4),
        "stop": st.one_of(texts, st.lists(st.text(min_size=1, max_size=5), max_size=3)),
        "stop_token_ids": st.lists(st.integers(0, 330), max_size=3),
        "stream": st.just(True),
        "echo": st.booleans(),
        "truncate_prompt_tokens": st.integers(-1, 110),
        "truncation_side": st.sampled_from(["left", "right"]),
        "temperature": st.floats(0, 2.1),
        "top_p": st.floats(0, 1),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "priority": st.integers(-(2**31), 2**31),
    },
)


@pytest.fixture(scope="module")
def ours(model_dir: Path) -> Tokenizer:
    return Tokenizer(ModelSection(path=str(model_dir)))


def agree(ours: Tokenizer, body: Any) -> None:
    """The body is the same request or the same error, wherever it is read, and either can be sent."""
    data = json.dumps(body).encode()
    try:
        request = tokenized(parse_body(data, ours.info), ours, LIMIT)
    except RequestError as error:
        assert 400 <= error.status < 500
        assert len(error.message) < 400
        json.dumps(error_body(error), ensure_ascii=False).encode()
        with pytest.raises(RequestError) as caught:
            unpack(read(bytearray(data), ours, LIMIT))
        assert vars(caught.value) == vars(error)
    else:
        assert unpack(read(bytearray(data), ours, LIMIT)) == request
        message = prefill_request(
            "cmpl-1-0", map(int, request.prompts[0]), sampling=request.sampling, priority=request.priority
        )
        assert decode(encode(message)) == message, "a worker would drop it"


@pytest.mark.medium
@settings(max_examples=1000)
@given(
    fields=st.one_of(values, likely, st.builds(lambda a, b: a | b, likely, st.dictionaries(names, values, max_size=2)))
)
def test_a_body_is_a_request_or_an_error_that_names_what_is_wrong(ours: Tokenizer, fields: Any) -> None:
    agree(ours, {"seed": 1} | fields if isinstance(fields, dict) and fields.get("seed") is None else fields)


@pytest.mark.medium
@pytest.mark.parametrize("name", [*COMPLETION_FIELDS.fields, "unknown"])
def test_so_it_is_with_any_value_of_each_field(ours: Tokenizer, name: str) -> None:
    for value in [*NUMBERS, *TEXTS, True, False, [], {}, [[]], [{}], [None], ["a"], [0], [-1], [10**400], {"a": 0}]:
        agree(ours, {"prompt": "hi", "seed": 1, name: value})
        agree(ours, {"prompt": "hi", "seed": 1, "stream": True, "stream_options": {name: value}})
