"""Forms of texts at the door: what is a grammar, what is too much of one, and that it holds nobody up."""

import asyncio
import json
import os
import random
import signal
import sys
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np
import pytest
from tokenizers import Tokenizer

from common.base.errors import RequestError
from common.grammar.grammars import Grammars
from common.wire.messages.worker import PrefillRequest
from router.base.helper_process import HelperProcess
from router.grammar.checks import MAX_KNOWN
from router.grammar.grammar_main import compiled, dialect_of
from router.grammar.source import ANYTHING, NO_GRAMMAR, GrammarSource
from router.requests.structured_fields import MAX_CHOICES
from router.requests.tool_choice import TOOL_CHOICE, form_of
from router.text.chat_answer import AnswerParser
from router.text.formats.parts import Part
from router.text.formats.shapes import CALL, THINK, THINK_END, Thoughts, ToolFormat
from router.text.formats.xml_calls import PARAMETER_END
from tests.router.conftest import Cluster
from tests.support.guided import TextFollower, is_valid
from tests.support.marks import first_then

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "sort": {"$ref": "#/$defs/sort"}},
    "required": ["name", "sort"],
    "additionalProperties": False,
    "$defs": {"sort": {"enum": ["ü", "b"]}},
}


def strict(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}}


HOSTILE: list[dict[str, Any]] = [
    {"guided_grammar": "start: A0\n" + "".join(f'A{i}: (A{i + 1})* "x"\n' for i in range(2500)) + 'A2500: "z"'},
    {"guided_regex": "a?" * 30_000},
    {"guided_regex": "[^a]*" * 12_000},
    {"guided_regex": "(" * 30_000 + ")" * 30_000},
    {"guided_regex": "(?=a)b"},
    {"guided_json": {"type": "integer", "multipleOf": 1_000_003}},
    strict({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2}),
    strict({"$ref": "https://example.com/schema.json"}),
    {"guided_json": {"$ref": "#/$defs/missing"}},
    strict({"$ref": "file:///etc/passwd"}),
    {"guided_json": {"allOf": [{"$ref": "#"}, {"type": "object"}]}},
    {"guided_json": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(9)]} for i in range(12)]}},
    strict({"type": "string", "pattern": "(?!a)"}),
    {"guided_json": {"type": "object", "unevaluatedProperties": 5}},
    {"guided_grammar": "start: missing"},
    {"guided_grammar": "root ::= ("},
    {"guided_grammar": "start: " + "(" * 20_000},
    {"guided_grammar": "root ::= " + "(" * 20_000},
    {
        "guided_grammar": "start: a a a a\n"
        + "".join(f"{x}: {y} {y} {y}\n" for x, y in zip("abcdef", "bcdefg", strict=True))
    },
    {"guided_grammar": '%llguidance {"no_forcing": 5}\nstart: x'},
    {"structured_outputs": {"json": {"type": "object"}, "whitespace_pattern": "("}},
    {"response_format": {"type": "json_schema", "schema": {"$ref": "#/$defs/missing"}}},
]


def random_text(grammar: str, grammars: Grammars, tokenizer: Tokenizer, seed: int, begin: str = "") -> str:
    ids = random_ids(grammar, grammars, tokenizer, seed, begin)
    ids = ids[:-1] if ids[-1:] == [*grammars.end_ids] else ids
    return str(tokenizer.decode(ids, skip_special_tokens=False))


FREE_TOKENS = 300
"""Random tokens of a text; afterwards its open parts are closed where they may be."""
CLOSINGS = ('"', f"\n{PARAMETER_END}", THINK_END)
"""Ends of parts that a grammar leaves free, which random tokens hardly write."""


def random_ids(grammar: str, grammars: Grammars, tokenizer: Tokenizer, seed: int, begin: str = "") -> list[int]:
    """Draw a whole text of what masks allow, behind a beginning."""
    rng, follower = random.Random(seed), TextFollower(grammar, grammars.end_ids)
    ids: list[int] = tokenizer.encode(begin, add_special_tokens=False).ids
    closings = [tokenizer.encode(text, add_special_tokens=False).ids for text in CLOSINGS]
    closing: list[int] = []
    outcome = follower.follow(grammars, ids)
    while not outcome.is_over and len(ids) < 2000:
        assert outcome.mask is not None, outcome
        allowed = np.unpackbits(outcome.mask.view(np.uint8), bitorder="little")
        if len(ids) >= FREE_TOKENS:
            ends = [each for each in grammars.end_ids if allowed[each]]
            closing = ends or closing or [*rng.choice(closings)]
        if closing and allowed[closing[0]]:
            ids.append(closing.pop(0))
        else:
            closing = []
            ids.append(int(rng.choice(np.flatnonzero(allowed))))
        outcome = follower.follow(grammars, ids[-1:])
    assert outcome.is_over, "the text has an end"
    return ids


async def ask(session: aiohttp.ClientSession, fields: dict[str, Any]) -> tuple[int, Any]:
    body = {"prompt": "the fox", "max_tokens": 5, "temperature": 0} | fields
    async with session.post("/v1/completions", json=body) as response:
        return response.status, await response.json()


async def found_in_the_end(session: aiohttp.ClientSession, fields: dict[str, Any]) -> tuple[int, Any]:
    """As a client that comes back: where a busy machine has no time for what a grammar may take, the answer is 503."""
    async with asyncio.timeout(200):
        while (answer := await ask(session, fields))[0] == 503:
            await asyncio.sleep(0.1)
    return answer


async def test_workers_get_a_grammar_with_each_request_that_asks_for_a_form(cluster: Cluster) -> None:
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": PERSON, "strict": True}}},
        {"response_format": {"type": "json_schema", "schema": PERSON}},
        {"structured_outputs": {"json": json.dumps(PERSON)}},
        {"guided_choice": ["a", 'b\n"ü']},
        {"guided_regex": "a/b\\/[^\n]"},
        {"structured_outputs": {"grammar": "start: /a+/"}},
    ]
    async with aiohttp.ClientSession(cluster.url) as session:
        for fields in [{}, {"response_format": {"type": "text"}}, *forms, forms[4] | {"n": 3}]:
            status, answer = await ask(session, fields)
            assert status == 200, answer
    sent = [message.sampling.grammar for message in cluster.workers[0].got(PrefillRequest)]
    assert sent[:2] == ["", ""] and all(json.loads(grammar)["grammars"] for grammar in sent[2:])
    assert len(sent) == 12 and len(set(sent[9:])) == 1 and sent[6] == sent[9]
    assert sent[3] == sent[4], "with `json_schema` around it or without"


@pytest.mark.medium
async def test_what_is_no_grammar_is_named_with_its_reason_and_the_next_is_taken(cluster: Cluster) -> None:
    async with aiohttp.ClientSession(cluster.url) as session:
        answers = await asyncio.gather(*(found_in_the_end(session, fields) for fields in HOSTILE))
        for fields, (status, answer) in zip(HOSTILE, answers, strict=True):
            (field,) = fields
            assert status == 400, (fields, answer)
            error = answer["error"]
            assert error["code"] == "invalid_grammar" and error["param"].startswith(field), (fields, error)
            assert error["message"].startswith(error["param"]) and len(error["message"]) < 500
        assert (await ask(session, {"guided_regex": "a"}))[0] == 200
        assert await asyncio.gather(*(ask(session, fields) for fields in HOSTILE)) == answers, "they are known"


LONG = "ab" * 400
REASONS = [
    (GrammarSource("regex", "x[z-a]y"), "invalid character class range, the start must be <= the end, at 'z-a'"),
    (
        GrammarSource("regex", f"{LONG}(?=b){LONG}"),
        "look-around, including look-ahead and look-behind, is not supported, at '(?='",
    ),
    (GrammarSource("regex", LONG + r"\bb" + LONG), "lookarounds not supported yet; WordUnicode"),
    (GrammarSource("grammar", 'root ::= "a" missing'), "GBNF, because it has no rule `start:` as Lark has: Rule 'miss"),
    (GrammarSource("grammar", 'root ::= "a'), "Unexpected end of input at line 1, 'root ::= \"a' ^ ''"),
    (GrammarSource("grammar", 'root ::= "a\\'), "it ends within an escape sequence"),
    (GrammarSource("grammar", "strat: X"), "Expected ::= at line 1, 'strat' ^ ': X'"),
    (GrammarSource("grammar", "root ::= " + "(" * 20_000), "it is nested too deep"),
    (GrammarSource("grammar", "start: missing"), 'at 1(8): unknown name: "missing"'),
    (GrammarSource("json", '{"$ref": "#"}', "guided_json", ""), "no text can follow it"),
    (GrammarSource("regex", r"[^\x00-\U0010ffff]"), "no text can follow it"),
]


@pytest.mark.parametrize(("source", "reason"), REASONS, ids=[reason[:20] for _, reason in REASONS])
def test_a_wrong_grammar_is_told_with_its_whole_reason(grammars: Grammars, source: GrammarSource, reason: str) -> None:
    grammar, problem, _ = compiled(source, grammars, dialect_of(grammars))
    assert not grammar and reason in problem and len(problem) < 200


@pytest.mark.parametrize(
    ("blanks", "is_allowed"), [("", True), ("  ", True), ("   ", False), ("\n" + " " * 20, True), ("\n\n", False)]
)
def test_json_has_few_blanks_between_its_parts(
    grammars: Grammars, demo_tokenizer: Tokenizer, blanks: str, is_allowed: bool
) -> None:
    grammar = compiled(GrammarSource("json", '{"type": "object"}'), grammars, dialect_of(grammars)).grammar
    ids = demo_tokenizer.encode(f'{{{blanks}"a":1}}', add_special_tokens=False).ids
    assert grammars.compile(grammar).consume_tokens(ids) is is_allowed


@pytest.mark.medium
def test_as_many_choices_as_are_taken_can_be_followed(grammars: Grammars, demo_tokenizer: Tokenizer) -> None:
    choices = [f'{i}. Akt\n"你好"/\\' for i in range(MAX_CHOICES)]
    grammar, problem, _ = compiled(GrammarSource("choice", json.dumps(choices)), grammars, dialect_of(grammars))
    assert not problem
    assert {random_text(grammar, grammars, demo_tokenizer, seed) for seed in range(9)} <= set(choices)


@pytest.mark.medium
async def test_requests_without_a_form_do_not_wait_for_grammars(cluster: Cluster) -> None:
    slow = [{"guided_json": {"type": "integer", "multipleOf": 1_000_003 + 2 * i}} for i in range(4)]
    async with aiohttp.ClientSession(cluster.url) as session:
        process = await cluster.service.grammars._running()
        os.kill(process.pid, signal.SIGSTOP)
        waiting = [asyncio.create_task(found_in_the_end(session, fields)) for fields in slow]
        await cluster.until(lambda: len(cluster.service.grammars._waiting) == len(slow), "they wait")
        assert (await ask(session, {}))[0] == 200
        assert not any(task.done() for task in waiting)
        os.kill(process.pid, signal.SIGCONT)
        assert {status for status, _ in await asyncio.gather(*waiting)} == {400}


@pytest.mark.medium
async def test_a_process_that_dies_is_started_again(cluster: Cluster) -> None:
    async with aiohttp.ClientSession(cluster.url) as session:
        assert (await ask(session, {"guided_regex": "a"}))[0] == 200
        process = cluster.service.grammars._helper.process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        lost = asyncio.create_task(ask(session, {"guided_regex": "b"}))
        await cluster.until(lambda: cluster.service.grammars._waiting, "it is asked")
        os.kill(process.pid, signal.SIGKILL)
        status, answer = await lost
        assert (status, answer["error"]["code"]) == (503, "grammar_queue_full")
        assert (await ask(session, {"guided_regex": "a"}))[0] == 200, "what is known needs no process"
        assert (await ask(session, {"guided_regex": "c"}))[0] == 200


UNFINISHED = """
import sys
from msgspec import msgpack
from router.base.helper_frames import GRAMMAR
from router.grammar.source import Found

while header := sys.stdin.buffer.read(GRAMMAR.size):
    number, num_bytes = GRAMMAR.unpack(header)
    sys.stdin.buffer.read(num_bytes)
    reply = msgpack.encode(Found())
    sys.stdout.buffer.write(GRAMMAR.pack(number, len(reply)) + reply)
    sys.stdout.buffer.flush()
"""


async def test_a_grammar_whose_compilation_did_not_finish_is_refused_and_tried_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks, source = cluster.service.grammars, GrammarSource("regex", "unfinished")
    helper = HelperProcess("", ())
    monkeypatch.setattr(helper, "_command", [sys.executable, "-c", UNFINISHED])
    monkeypatch.setattr(checks, "_helper", helper)
    with pytest.raises(RequestError) as error:
        await checks.compiled(source)
    assert (error.value.status, error.value.code) == (503, "grammar_queue_full")
    assert source not in checks._known
    await helper.end()


async def test_a_grammar_whose_client_leaves_while_the_process_starts_is_compiled(cluster: Cluster) -> None:
    checks, source = cluster.service.grammars, GrammarSource("regex", "d")
    async with checks._helper._starting:
        asking = asyncio.create_task(checks.compiled(source))
        await cluster.until(lambda: checks._waiting, "it waits")
        asking.cancel()
        await asyncio.wait([asking])
    await cluster.until(lambda: not checks._waiting, "it waits no more")
    assert source in checks._known


async def test_what_is_known_is_bounded(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = cluster.service.grammars
    monkeypatch.setattr("router.grammar.checks.MAX_KNOWN", 5)
    async with aiohttp.ClientSession(cluster.url) as session:
        for i in range(12):
            assert (await ask(session, {"guided_regex": f"a{i}"}))[0] == 200
    assert len(checks._known) == 5 < MAX_KNOWN
    assert checks._num_known_chars == sum(
        len(source.text) + len(source.whitespace) + len(each.grammar) for source, each in checks._known.items()
    )


@pytest.mark.medium
@pytest.mark.parametrize(
    ("thoughts", "begin"),
    [
        ("", ""),
        ("may come", ""),
        ("may come", "<think>Hm. {</think>\n\n"),
        ("have begun", "\nHm. </thin> {\n</think>\n\n"),
        ("have begun", "</think>"),
    ],
)
def test_a_form_begins_behind_what_a_model_thinks(
    grammars: Grammars, demo_tokenizer: Tokenizer, thoughts: Thoughts, begin: str
) -> None:
    grammar, problem, _ = compiled(
        GrammarSource("json", json.dumps(PERSON), "guided_json", "", thoughts), grammars, dialect_of(grammars)
    )
    assert not problem
    for seed in range(20):
        text = random_text(grammar, grammars, demo_tokenizer, seed, begin)
        parser = AnswerParser(thoughts=thoughts, tool_format="")
        part = parser.feed(text, is_last=True)
        assert bool(part.thought) == ("Hm" in begin) or not begin, text
        if part.content:  # without end no thoughts
            assert is_valid(part.content, PERSON)
        assert part.content or not begin


@pytest.mark.medium
@pytest.mark.parametrize("asked", [ANYTHING, GrammarSource("json", json.dumps(PERSON), "guided_json", "")])
@pytest.mark.parametrize("most", [0, 3])
@pytest.mark.parametrize("thoughts", ["may come", "have begun"])
def test_thoughts_have_so_many_tokens_at_most(
    grammars: Grammars, demo_tokenizer: Tokenizer, asked: GrammarSource, most: int, thoughts: Thoughts
) -> None:
    source = replace(asked, thoughts=thoughts, max_thought_tokens=most)
    grammar, problem, _ = compiled(source, grammars, dialect_of(grammars))
    if THINK_END not in grammars.special_tokens:
        assert "</think> is no token of this model" in problem
        return
    assert not problem
    begin, end = "" if thoughts == "have begun" else THINK, int(demo_tokenizer.token_to_id(THINK_END) or 0)
    lengths = set()
    for seed in range(6):
        ids = random_ids(grammar, grammars, demo_tokenizer, seed, begin)
        lengths.add(ids.index(end) - bool(begin))
        said = str(demo_tokenizer.decode(ids[ids.index(end) + 1 :]))
        assert asked is ANYTHING or is_valid(said, PERSON)
    assert max(lengths) == most, "a random text hardly ends its thoughts before"


FORMATS = [ToolFormat.HERMES, ToolFormat.XML, ToolFormat.LLAMA]
NOTHING = {"properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False}
SCHEMAS: dict[str, Any] = {"grüße": PERSON, 'say "no"': NOTHING}


def named(*names: str) -> list[Any]:
    """Functions, as a client names them."""
    return [{"type": "function", "function": {"name": name}} for name in names]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named(*names)}}


def chat(choice: Any, *, several: bool = True, strict: bool = False) -> dict[str, Any]:
    """What a chat says of its tools."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]
    checked = TOOL_CHOICE.checked("tool_choice", choice)
    return {"tools": tools, "tool_choice": checked, "parallel_tool_calls": several}


def answers_of(
    source: GrammarSource, tool_format: ToolFormat, model: tuple[Grammars, Tokenizer], begin: str = ""
) -> list[Part]:
    """Random ones, taken apart."""
    grammar, problem, _ = compiled(source, model[0], dialect_of(model[0]))
    assert not problem
    texts = [random_text(grammar, *model, seed, begin) for seed in range(12)]
    parsers = [AnswerParser(thoughts="", tool_format=tool_format, schemas=SCHEMAS) for _ in texts]
    return [parser.feed(text, is_last=True) for parser, text in zip(parsers, texts, strict=True)]


def check_calls(part: Part) -> set[str]:
    """Their arguments are valid; returns what is called."""
    for call in part.calls:
        assert is_valid(call.arguments, SCHEMAS[call.name])
    return {call.name for call in part.calls}


@pytest.mark.medium
@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize("choice", ["required", *named("grüße"), allowed("required", "grüße")])
@pytest.mark.parametrize("several", [True, False])
def test_calls_that_are_forced_are_calls_with_valid_arguments(
    grammars: Grammars, demo_tokenizer: Tokenizer, tool_format: ToolFormat, choice: Any, several: bool
) -> None:
    source = form_of(chat(choice, several=several), tool_format, NO_GRAMMAR)
    parts = answers_of(source, tool_format, (grammars, demo_tokenizer))
    assert all(part.calls and not part.content.strip() for part in parts)
    assert set().union(*map(check_calls, parts)) == (set(SCHEMAS) if choice == "required" else {"grüße"})
    has_several = several and tool_format is not ToolFormat.LLAMA and choice not in named("grüße")
    assert (max(len(part.calls) for part in parts) > 1) == has_several


@pytest.mark.medium
@pytest.mark.parametrize("tool_format", first_then(pytest.mark.slow, FORMATS))
def test_calls_of_strict_tools_have_valid_arguments_and_a_text_may_stand_there_too(
    grammars: Grammars, demo_tokenizer: Tokenizer, tool_format: ToolFormat
) -> None:
    model = (grammars, demo_tokenizer)
    source = form_of(chat("auto", strict=True), tool_format, NO_GRAMMAR)
    said = answers_of(source, tool_format, model, "I say { no <tool_cal")
    assert all(part.content.startswith("I say { no") and check_calls(part) <= SCHEMAS.keys() for part in said)
    begin = "" if tool_format is ToolFormat.LLAMA else "Well.\n<tool_call>\n"
    begin += "<function=gr" if tool_format is ToolFormat.XML else '{"name": "gr'
    parts = answers_of(source, tool_format, model, begin)
    assert all("grüße" in check_calls(part) for part in parts)
    free = form_of(chat("auto"), tool_format, NO_GRAMMAR)
    assert free == NO_GRAMMAR, "nothing is asked of calls"


@pytest.mark.medium
@pytest.mark.parametrize("tool_format", first_then(pytest.mark.slow, FORMATS))
def test_tools_that_are_not_allowed_are_not_called(
    grammars: Grammars, demo_tokenizer: Tokenizer, tool_format: ToolFormat
) -> None:
    model = (grammars, demo_tokenizer)
    source = form_of(chat(allowed("auto", "grüße")), tool_format, NO_GRAMMAR)
    begins = {ToolFormat.HERMES: '<tool_call>\n{"name": "', ToolFormat.XML: "<tool_call>\n<function="}
    parts = answers_of(source, tool_format, model, begins.get(tool_format, '{"name": "'))
    assert all({call.name for call in part.calls} <= {"grüße"} for part in parts)
    assert any(part.calls for part in parts)
    assert all(part.content for part in answers_of(source, tool_format, model, "I say"))


def test_a_form_that_is_asked_for_beside_tools_is_that_of_texts_that_call_none(
    grammars: Grammars, demo_tokenizer: Tokenizer
) -> None:
    asked = GrammarSource("json", json.dumps(NOTHING), "guided_json", "")
    source = form_of(chat("auto", strict=True), ToolFormat.HERMES, asked)
    model = (grammars, demo_tokenizer)
    parts = answers_of(source, ToolFormat.HERMES, model) + answers_of(source, ToolFormat.HERMES, model, CALL)
    for part in parts:
        assert check_calls(part) or is_valid(part.content, NOTHING)
    assert {bool(part.calls) for part in parts} == {True, False}
    assert form_of(chat("none"), ToolFormat.HERMES, asked) is asked
    forced = form_of(chat("required"), ToolFormat.HERMES, asked)
    assert forced == form_of(chat("required"), ToolFormat.HERMES, NO_GRAMMAR), "an agent's loop asks for both"
    with pytest.raises(RequestError):
        form_of(chat("auto"), ToolFormat.LLAMA, asked)


def test_calls_that_cannot_be_forced_are_refused() -> None:
    long = {"name": "f", "parameters": {"a": "b" * 70_000}}
    for fields in (
        chat("required") | {"tools": []},
        chat(*named("g")),
        chat(allowed("auto", "grüße", "g")),
        chat("required") | {"tools": [{"type": "function", "function": long}]},
    ):
        with pytest.raises(RequestError):
            form_of(fields, ToolFormat.HERMES, NO_GRAMMAR)
