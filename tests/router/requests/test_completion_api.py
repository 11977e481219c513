import json
from pathlib import Path
from typing import Any

import pytest

from common.base.errors import RequestError
from router.answers.completion_bodies import ChunkWriter
from router.api.field_tables import written
from router.dispatch.completion.choice import Delivery
from router.http.errors import error_body
from router.requests.completion_api import CompletionRequest, ResponseOptions, choice_seed, parse
from router.requests.completion_fields import COMPLETION_FIELDS
from router.text.prompts import fit_max_tokens
from tests.support.completions import choice_of, make_completion

ROOT = Path(__file__).parents[3]
VOCAB = 100
EOS = (7,)
PLAIN = ResponseOptions(stream=False, include_usage=False, continuous_usage=False, token_ids=False, tokens_as_ids=False)


def parsed(**fields: Any) -> CompletionRequest:
    return parse({"prompt": "hi"} | fields, "tiny", VOCAB, EOS)


OPTIONAL = [name for name in COMPLETION_FIELDS.fields if name != "prompt"]

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"model": "tiny"},
    {"prompt": ["a", "b"]},
    {"prompt": [1.0, 2], "stop_token_ids": [3.0]},
    {"prompt": [1, 2, 99]},
    {"prompt": [[0], [1, 2]]},
    {"prompt": ["x"] * 1024},
    {"prompt": ["a", [1, 2], "b"]},
    {"prompt": [[1], "a"]},
    {"max_tokens": 0, "echo": True},
    {"max_tokens": 1},
    {"max_tokens": 10**9},
    {"max_tokens": 5.0},
    {"temperature": 0},
    {"temperature": 2},
    {"top_p": 0.001},
    {"top_p": 1},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 50},
    {"min_p": 0.5},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"stop": "x"},
    {"stop": []},
    {"stop": ["x" * 1024]},
    {"stop": ["\n"] * 64},
    {"stop_token_ids": [0, 99] * 16},
    {"include_stop_str_in_output": True, "skip_special_tokens": False, "spaces_between_special_tokens": False},
    {"add_special_tokens": False, "truncate_prompt_tokens": 1, "truncation_side": "right"},
    {"truncate_prompt_tokens": -1},
    {"n": 128},
    {"n": 2, "best_of": 2},
    {"n": 2, "best_of": 1},
    {"n": 2, "best_of": 0},
    {"n": 3, "temperature": 0},
    {"echo": True, "return_token_ids": True, "cache_salt": "x" * 128},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"suffix": ""},
    {"logit_bias": {"0": -100, "99": 100, "7": 0.5}},
    {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 1.1},
    {"logprobs": 20, "return_tokens_as_token_ids": True},
    {"logprobs": 0, "echo": True, "max_tokens": 0, "stream": True},
    {"prompt_logprobs": 20},
    {"min_tokens": 16, "allowed_token_ids": [99, 0, 0]},
    {"bad_words": ["x" * 16] * 128},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {}},
    {"stream": True, "stream_options": {"include_usage": None, "other": None, "include_obfuscation": True}},
    {"user": "x" * 512},
    {"priority": -(2**31) + 1},
    {"ignore_eos": True},
    {"repetition_penalty": 1.0, "length_penalty": 1, "use_beam_search": False, "min_tokens": 0, "bad_words": []},
    {"response_format": {"type": "text"}, "skip_special_tokens": True},
    {"unknown": None},
    dict.fromkeys(OPTIONAL),
]


def deep(levels: int) -> dict[str, Any]:
    """Schemas in one another."""
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


REJECTED: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [""]}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": [[1], []]}),
    ("prompt", {"prompt": ["a", 1]}),
    ("prompt", {"prompt": ["a", None]}),
    ("prompt", {"prompt": [{"prompt": "a"}]}),
    ("prompt", {"prompt": [1, "a"]}),
    ("prompt", {"prompt": [[1], 2]}),
    ("prompt", {"prompt": ["a", []]}),
    ("prompt", {"prompt": ["a", [1, "b"]]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": [1, True]}),
    ("prompt", {"prompt": [1.5]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": [100]}),
    ("prompt", {"prompt": [[1], [100]]}),
    ("prompt", {"prompt": [10**30]}),
    ("prompt", {"prompt": ["x"] * 1025}),
    ("prompt", {"prompt": {"a": 1}}),
    ("prompt", {"prompt": 5}),
    ("prompt", {"prompt": "\ud800"}),
    ("model", {"model": 5}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": "5"}),
    ("max_tokens", {"max_tokens": True}),
    ("max_tokens", {"max_tokens": float("inf")}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 2.1}),
    ("temperature", {"temperature": float("nan")}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": True}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.1}),
    ("top_p", {"top_p": float("inf")}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": 1.5}),
    ("seed", {"seed": 2**63}),
    ("seed", {"seed": 1.5}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": ["a", ""]}),
    ("stop", {"stop": ["a"] * 65}),
    ("stop", {"stop": ["x" * 513] * 2}),
    ("stop", {"stop": "\ud800"}),
    ("stop_token_ids", {"stop_token_ids": [100]}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("stop_token_ids", {"stop_token_ids": [1] * 33}),
    ("stop_token_ids", {"stop_token_ids": ["1"]}),
    ("stop_token_ids", {"stop_token_ids": 1}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
    ("truncation_side", {"truncation_side": "middle"}),
    ("add_special_tokens", {"add_special_tokens": "no"}),
    ("stop", {"stop": [1]}),
    ("stop", {"stop": {"a": "b"}}),
    ("n", {"n": 0}),
    ("n", {"n": 129}),
    ("n", {"n": "2"}),
    ("best_of", {"n": 1, "best_of": 2}),
    ("best_of", {"n": 3, "best_of": 2}),
    ("best_of", {"best_of": -1}),
    ("echo", {"echo": "yes"}),
    ("cache_salt", {"cache_salt": ""}),
    ("cache_salt", {"cache_salt": "x" * 129}),
    ("cache_salt", {"cache_salt": "a/b"}),
    ("cache_salt", {"cache_salt": "a\0"}),
    ("suffix", {"suffix": "tail"}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": True}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
    ("prompt_logprobs", {"prompt_logprobs": 0, "stream": True}),
    ("logit_bias", {"logit_bias": [5]}),
    ("logit_bias", {"logit_bias": {"five": 1}}),
    ("logit_bias", {"logit_bias": {"-5": 1}}),
    ("logit_bias", {"logit_bias": {"9" * 500: 1}}),
    ("logit_bias", {"logit_bias": {"5": 1, "05": 1}}),
    ("logit_bias", {"logit_bias": {"1000000": 1}}),
    ("logit_bias", {"logit_bias": {f"0{i}": 1 for i in range(1025)}}),
    ("logit_bias.5", {"logit_bias": {"5": 101}}),
    ("logit_bias.5", {"logit_bias": {"5": None}}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("frequency_penalty", {"frequency_penalty": "-1"}),
    ("allowed_token_ids", {"allowed_token_ids": []}),
    ("allowed_token_ids", {"allowed_token_ids": [1000000]}),
    ("allowed_token_ids", {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}),
    ("min_tokens", {"min_tokens": 17}),
    ("min_tokens", {"min_tokens": 6, "max_tokens": 5}),
    ("min_tokens", {"min_tokens": -1}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options", {"stream": False, "stream_options": {}}),
    ("stream_options", {"stream": True, "stream_options": []}),
    ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 1}}),
    ("stream_options.other", {"stream": True, "stream_options": {"other": 1}}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("repetition_penalty", {"repetition_penalty": True}),
    ("min_tokens", {"min_tokens": False}),
    ("bad_words", {"bad_words": "love"}),
    ("bad_words", {"bad_words": [""]}),
    ("bad_words", {"bad_words": [[1, 2]]}),
    ("bad_words", {"bad_words": ["\ud800"]}),
    ("bad_words", {"bad_words": ["x"] * 129}),
    ("bad_words", {"bad_words": ["x" * 4097]}),
    ("response_format.type", {"response_format": {"type": "json"}}),
    ("response_format.type", {"response_format": {}}),
    ("response_format", {"response_format": "json_object"}),
    ("response_format.json_schema.schema", {"response_format": {"type": "json_schema"}}),
    ("response_format.json_schema.schema", {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}),
    (
        "response_format.schema",
        {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}},
    ),
    ("guided_regex", {"guided_regex": ""}),
    ("guided_regex", {"guided_regex": "a" * 65_537}),
    ("guided_regex", {"guided_regex": "\ud800"}),
    ("guided_json", {"guided_json": "{"}),
    ("guided_json", {"guided_json": "[]"}),
    ("guided_json", {"guided_json": 5}),
    ("guided_json", {"guided_json": "[" * 50_000}),
    ("guided_json", {"guided_json": {"const": "a" * 65_536}}),
    ("guided_json", {"guided_json": {"const": "\ud800"}}),
    ("guided_json", {"guided_json": deep(65)}),
    ("structured_outputs.choice", {"structured_outputs": {"choice": []}}),
    ("structured_outputs.choice", {"structured_outputs": {"choice": ["a", ""]}}),
    ("structured_outputs.choice", {"structured_outputs": {"choice": ["a", 5]}}),
    ("structured_outputs.choice", {"structured_outputs": {"choice": ["a"] * 4097}}),
    ("structured_outputs.regexp", {"structured_outputs": {"regexp": "a"}}),
    ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "{}"}}),
    ("structured_outputs.regex", {"structured_outputs": {"json": {}, "regex": "a"}}),
    ("guided_choice", {"response_format": {"type": "json_object"}, "guided_choice": ["a"]}),
    ("structured_outputs.json_object", {"structured_outputs": {"json": {}, "json_object": True}}),
    ("guided_whitespace_pattern", {"guided_regex": "a", "guided_whitespace_pattern": " "}),
    ("structured_outputs.disable_any_whitespace", {"structured_outputs": {"disable_any_whitespace": True}}),
    ("guided_decoding_backend", {"guided_decoding_backend": "outlines"}),
    ("max_token", {"max_token": 5}),
    ("max_completion_tokens", {"max_completion_tokens": 5}),
    ("unknown", {"unknown": {"deep": [1, 2]}}),
    ("temperature", {"temperature": 10**400}),
    ("user", {"user": 5}),
    ("user", {"user": "x" * 513}),
    ("priority", {"priority": 2**31}),
    ("priority", {"priority": "high"}),
    ("ignore_eos", {"ignore_eos": 1}),
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_accepted(fields: dict[str, Any]) -> None:
    parsed(**fields)


@pytest.mark.parametrize(("param", "fields"), REJECTED, ids=lambda value: str(value)[:60])
def test_rejected_naming_the_field(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        parsed(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message
    assert len(caught.value.message) < 300


def test_defaults_and_explicit_nulls_are_the_same() -> None:
    for request in (parsed(), parsed(**ACCEPTED[-1])):
        sampling = request.sampling
        assert (request.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (None, 1.0, 1.0, 0)
        assert (sampling.min_p, sampling.stop_token_ids) == (0.0, EOS)
        assert (request.n, request.text.stops, request.response) == (1, (), PLAIN)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("tempurature", "temperature"),
        ("stop_tokens_id", "stop_token_ids"),
        ("topp", "top_p"),
    ],
)
def test_a_typo_is_told_what_was_meant(name: str, meant: str) -> None:
    with pytest.raises(RequestError, match=f"unknown field '{name}': did you mean {meant}") as caught:
        parsed(**{name: 1})
    assert (caught.value.param, caught.value.code) == (name, "unknown_field")
    with pytest.raises(RequestError, match=r"did you mean stream_options\.include_usage"):
        parsed(stream=True, stream_options={"include_usages": True})


@pytest.mark.parametrize("name", ["x" * 1_000_000, "\ud800", "", "\n", "ключ"])
def test_whatever_an_unknown_field_is_called_the_error_can_be_sent(name: str) -> None:
    with pytest.raises(RequestError, match="leave it out") as caught:
        parsed(**{name: 1})
    assert len(json.dumps(error_body(caught.value))) < 700
    json.dumps(error_body(caught.value), ensure_ascii=False).encode()


def test_the_lists_in_the_api_page_are_the_tables() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert "| `max_tokens` |" in page
    assert written(page) == page, "run `python -m router.api.field_tables docs/api.md`"


def test_another_model_is_404() -> None:
    with pytest.raises(RequestError) as caught:
        parsed(model="x" * 10_000)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("body", [None, [], "x", 5])
def test_a_body_that_is_no_object(body: object) -> None:
    with pytest.raises(RequestError):
        parse(body, "tiny", VOCAB, EOS)


@pytest.mark.parametrize(
    ("asked", "taken"), [(0, 0.0), (1e-46, 0.0), (1e-38, 0.0), (9e-6, 0.0), (1e-5, 1e-5), (2, 2.0)]
)
def test_a_temperature_that_logits_cannot_be_divided_by_is_greedy(asked: float, taken: float) -> None:
    assert parsed(temperature=asked).sampling.temperature == taken


def test_numbers_below_zero_are_as_asked() -> None:
    assert parsed(presence_penalty=-1e-9).sampling.presence_penalty == -1e-9


def test_the_queue_is_told_who_asks_and_how_urgently() -> None:
    assert (parsed().client, parsed().priority) == ("", 0)
    assert (parsed(user="somebody", priority=-3).client, parsed(user="somebody", priority=-3).priority) == (
        "somebody",
        -3,
    )


def test_tokens_that_end_the_text_are_the_models_and_the_clients() -> None:
    both = parsed(stop_token_ids=[9, 7, 9])
    assert (both.sampling.stop_token_ids, both.text.stop_token_ids) == ((7, 9), (9, 9))
    own = parsed(stop_token_ids=[9, 7], ignore_eos=True)
    assert (own.sampling.stop_token_ids, own.text.stop_token_ids) == ((9, 7), (9, 7))


def test_seeds_are_unsigned_63_bits_and_random_without_one() -> None:
    assert parsed(seed=5).sampling.seed == 5
    assert 0 <= parsed(seed=-1).sampling.seed < 2**63
    assert len({parsed().sampling.seed for _ in range(20)}) == 20


def test_seeds_of_choices_differ_and_are_reproducible() -> None:
    seeds = [choice_seed(5, choice) for choice in range(128)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 128
    assert seeds == [choice_seed(5, choice) for choice in range(128)]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_max_tokens_beyond_the_context_is_refused_and_the_default_is_cut() -> None:
    assert fit_max_tokens(10, 90, 100) == 90
    assert fit_max_tokens(10, None, 100) == 16
    assert fit_max_tokens(90, None, 100) == 10
    assert fit_max_tokens(99, 0, 100) == 0
    with pytest.raises(
        RequestError, match=r"max_tokens = 91: .* 100 tokens, and the prompt has 10: .* at most 90"
    ) as caught:
        fit_max_tokens(10, 91, 100)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")
    with pytest.raises(RequestError, match=r"100 tokens.*at most 99") as caught:
        fit_max_tokens(100, None, 100)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(RequestError, match="empty"):
        fit_max_tokens(0, 16, 100)


@pytest.mark.parametrize("text", ["", 'quote " and \\ and \n', "你好 🎉 \u2028", "\x00\x7f"])
def test_stream_chunks_are_json(text: str) -> None:
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": 'na"me'}
    choice = choice_of(make_completion(index=3))
    ending = {"finish_reason": "stop", "stop_reason": None}
    for reason, end in ((None, {"finish_reason": None}), ("stop", ending)):
        chunk = ChunkWriter(head, PLAIN, choice).chunk(Delivery(3, text, 1, reason))
        assert chunk.startswith(b"data: ")
        assert chunk.endswith(b"\n\n")
        body = json.loads(chunk[len("data: ") :])
        assert body == head | {"choices": [{"index": 3, "text": text, "logprobs": None} | end]}


def test_error_shape() -> None:
    for status, kind in ((400, "invalid_request_error"), (429, "rate_limit_error"), (503, "server_error")):
        body = error_body(RequestError("no", param="n", code="c", status=status))
        assert body == {"error": {"message": "no", "type": kind, "param": "n", "code": "c"}}
