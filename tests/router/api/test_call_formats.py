"""Chats of Mistral's models, gpt-oss, Gemma 4 and Qwen3.5, from the template to what openai's client puts together."""

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import openai
import pytest
import tokenizers

from common.wire.messages.worker import PrefillRequest
from common.wire.values.fingerprint import model_fingerprint, tokenizer_fingerprint
from common.wire.values.packing import unpack_ids
from common.wire.values.sampling_params import SamplingParams
from router.text.formats.parts import is_short_id
from tests.router.conftest import MAX_MODEL_LEN, TEXT, Cluster, StartCluster
from tests.support.fakes import FakeModel
from tests.support.marks import first_then

BOS = "<s>"
TURNS = """
{%- if tools %}{{- '[TOOLS]' + tools | tojson }}{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}{{- CALL }}{%- endfor %}
    {%- else %}{{- message.role + ': ' + message.content }}{%- endif %}
{%- endfor %}
"""


class Family(NamedTuple):
    """Models that write alike.

    Args:
        call: of the template, the expression that writes a call.
        end: the end of the template.
        marks: special tokens.
        thought: what the model writes around a thought.
        called: what it writes as two calls, or one.
        stop: the token that it writes then.
        begins: whether a text begins with BOS.
    """

    call: str
    end: str
    marks: tuple[str, ...]
    thought: str
    called: str
    stop: str
    begins: bool = False


ARGUMENTS = '{"city": "Köln", "days": 3}'
FAMILIES = {
    "mistral": Family(
        "'[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + call.function.arguments | tojson",
        "{{- '[/INST]' }}{%- if thinks is defined %}{{- '[THINK]' + '[/THINK]' }}{%- endif %}",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]", "[/INST]", "</s>"),
        "[THINK]They ask.[/THINK]",
        f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{{}}",
        "</s>",
        begins=True,
    ),
    "gpt-oss": Family(
        "'<|channel|>commentary to=functions.' + call.function.name + '<|message|>' + call.function.arguments | tojson",
        "{%- for each in tools or [] %}{{- '//' + each.function.description }}{%- endfor %}{{- '<|start|>assistant' }}",
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"),
        "<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant",
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}",
        "<|call|>",
    ),
    "gemma": Family(
        "'<|tool_call>call:' + call.function.name + '{}<tool_call|>'",
        "{{- '<|turn>model\n' }}{%- if thinks is defined %}{{- '<|channel>thought\n<channel|>' }}{%- endif %}",
        ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|turn>", "<turn|>", "<|tool_response>"),
        "<|channel>thought\nThey ask.\n<channel|>",
        '<|tool_call>call:weather{city:<|"|>Köln<|"|>,days:3}<tool_call|><|tool_call>call:now{}<tool_call|>',
        "<|tool_response>",
        begins=True,
    ),
    "qwen3.5": Family(
        "'<tool_call>\n<function=' + call.function.name + '>\n</function>\n</tool_call>'",
        "{{- '<|im_start|>assistant\n<think>\n' }}{%- if thinks is defined %}{{- '</think>' }}{%- endif %}",
        ("<|im_start|>", "<|im_end|>"),
        "They ask.\n</think>\n\n",
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "<|im_end|>",
    ),
}
WEATHER = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"} | WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
USER: Any = {"role": "user", "content": "What light is that?"}


@dataclasses.dataclass(frozen=True)
class ScriptedModel(FakeModel):
    """Says what a test wants it to."""

    script: list[int] = dataclasses.field(default_factory=list)

    def output(self, index: int, last: int, sampling: SamplingParams) -> int:
        return self.script[index % len(self.script)]


@pytest.fixture(scope="module", params=first_then(pytest.mark.medium, FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def model_dir(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of single bytes with the family's special tokens; only one token is known to end a text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>", BOS, *family.marks],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    size = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": MAX_MODEL_LEN}
    end = family.stop if family.stop == "</s>" or "im_end" in family.stop else "<eos>"
    (path / "config.json").write_text(json.dumps(size | {"eos_token_id": tokenizer.token_to_id(end)}))
    begin = "{{- bos_token }}" if family.begins else ""
    template = begin + TURNS.replace("CALL", family.call) + family.end
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "bos_token": BOS}))
    return path


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def model(model_dir: Path, tokenizer: tokenizers.Tokenizer) -> ScriptedModel:
    return ScriptedModel(
        "tiny", model_fingerprint(model_dir), tokenizer_fingerprint(model_dir), tokenizer.get_vocab_size()
    )


@pytest.fixture
async def chats(cluster: Cluster) -> AsyncIterator[Any]:
    client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=100.0)
    async with client:
        yield client.chat.completions


def say(model: ScriptedModel, tokenizer: tokenizers.Tokenizer, text: str) -> None:
    model.script[:] = tokenizer.encode(text, add_special_tokens=False).ids


def told(message: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """Thoughts, content, and name and arguments of each call."""
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return getattr(message, "reasoning_content", None) or "", message.content or "", calls


def prompt_of(cluster: Cluster, tokenizer: tokenizers.Tokenizer) -> str:
    """The prompt of the last request."""
    (*_, message) = cluster.workers[0].got(PrefillRequest)
    return str(tokenizer.decode(list(unpack_ids(message.token_ids)), skip_special_tokens=False))


async def streamed(chats: Any, **fields: Any) -> Any:
    """The choice that openai's client puts together, after a look at the chunks."""
    async for chunk in await chats.create(model="tiny", stream=True, **fields):
        delta = chunk.choices[0].delta
        news = delta.content or delta.tool_calls or getattr(delta, "reasoning_content", None)
        assert news or delta.role or chunk.choices[0].finish_reason, "an event without news"
    async with chats.stream(model="tiny", **fields) as stream:
        async for _ in stream:
            pass
        return (await stream.get_final_completion()).choices[0]


async def test_thoughts_and_calls_are_the_same_whole_and_streamed(
    chats: Any, cluster: Cluster, model: ScriptedModel, tokenizer: tokenizers.Tokenizer, family: Family
) -> None:
    say(model, tokenizer, f"{family.thought}{family.called}{family.stop}more")
    fields: dict[str, Any] = {"messages": [USER], "tools": TOOLS, "temperature": 0}
    whole = (await chats.create(model="tiny", **fields)).choices[0]
    choice = await streamed(chats, **fields)
    for each in (whole, choice):
        thought, content, calls = told(each.message)
        assert (thought, content, calls[0][0], each.finish_reason) == ("They ask.", "", "weather", "tool_calls")
        assert json.loads(calls[0][1]) == json.loads(ARGUMENTS)
        assert calls[1:] == [("now", "{}")] * ("now" in family.called)
    assert told(whole.message) == told(choice.message)
    message = whole.message.model_dump(exclude_none=True)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "a"} for call in message["tool_calls"]]
    say(model, tokenizer, f"{family.stop}")
    await chats.create(model="tiny", **fields | {"messages": [USER, message, *results]})
    prompt = prompt_of(cluster, tokenizer)
    assert family.call.split("'")[1].replace("\\n", "\n") + "weather" in prompt
    assert prompt.count(BOS) == family.begins
    if "[CALL_ID]" in prompt:
        assert is_short_id(prompt.partition("[CALL_ID]")[2].partition("[ARGS]")[0])


async def test_of_a_forced_call_there_is_no_text_and_no_event_without_news(
    chats: Any, model: ScriptedModel, tokenizer: tokenizers.Tokenizer, family: Family
) -> None:
    say(model, tokenizer, f"{family.thought}{family.called}{family.stop}")
    fields: dict[str, Any] = {"messages": [USER], "tools": TOOLS, "tool_choice": "required", "temperature": 0}
    choice = await streamed(chats, **fields)
    thought, content, calls = told(choice.message)
    assert (thought, content, calls[0][0], choice.finish_reason) == ("They ask.", "", "weather", "tool_calls")
    only = {"type": "function", "function": {"name": "now"}}
    whole = (await chats.create(model="tiny", **fields | {"tool_choice": only})).choices[0]
    assert told(whole.message) == told(choice.message), "what is called is the grammar's matter"


async def test_an_answer_without_calls_and_a_wrong_call_are_text(
    chats: Any, model: ScriptedModel, tokenizer: tokenizers.Tokenizer, family: Family
) -> None:
    header = "<|channel|>final<|message|>" * ("<|channel|>" in family.marks)
    trigger = family.called.partition("weather")[0].removesuffix("to=functions.").removesuffix("<function=").strip()
    for text in ("Well. {", f"Well.{'' if header else trigger} nothing", "Hä?"):
        say(model, tokenizer, f"{family.thought}{header}{text}{family.stop}")
        fields: dict[str, Any] = {"messages": [USER], "tools": TOOLS, "temperature": 0}
        whole = (await chats.create(model="tiny", **fields)).choices[0]
        choice = await streamed(chats, **fields)
        assert told(whole.message) == told(choice.message) == ("They ask.", text, [])
        assert whole.finish_reason == choice.finish_reason == "stop"


async def test_without_tools_nothing_is_called(
    chats: Any, model: ScriptedModel, tokenizer: tokenizers.Tokenizer, family: Family
) -> None:
    say(model, tokenizer, f"{family.thought}{family.called}{family.stop}")
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        whole = (await chats.create(model="tiny", messages=[USER], **fields)).choices[0]
        thought, content, calls = told(whole.message)
        assert (thought, calls, whole.finish_reason) == ("They ask.", [], "stop")
        assert "Köln" in content


async def test_bos_stands_before_a_text_once(
    chats: Any, cluster: Cluster, model: ScriptedModel, tokenizer: tokenizers.Tokenizer, family: Family
) -> None:
    say(model, tokenizer, family.stop)
    for special in (False, True):
        await chats.create(model="tiny", messages=[USER], extra_body={"add_special_tokens": special})
        prompt = prompt_of(cluster, tokenizer)
        assert prompt.count(BOS) == prompt.startswith(BOS) == family.begins
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        for text in ("the fox", f"{BOS * family.begins}the fox"):
            await client.completions.create(model="tiny", prompt=text)
            assert prompt_of(cluster, tokenizer) == f"{BOS * family.begins}the fox"
        await client.completions.create(model="tiny", prompt="the fox", extra_body={"add_special_tokens": False})
        assert prompt_of(cluster, tokenizer) == "the fox"


@pytest.mark.parametrize("family", ["mistral"], indirect=True)
async def test_comments_fill_the_silence_while_nothing_is_told(
    start_cluster: StartCluster, model: ScriptedModel, tokenizer: tokenizers.Tokenizer, family: Family
) -> None:
    cluster = await start_cluster(stream_keepalive_s=0.1)
    cluster.prefill()
    cluster.decode(step_s=0.01)
    say(model, tokenizer, f"{'a ' * 40}{family.stop}")
    body = {"messages": [USER], "tools": TOOLS, "tool_choice": "required", "stream": True}
    async with (
        aiohttp.ClientSession(cluster.url) as session,
        session.post("/v1/chat/completions", json=body) as response,
    ):
        events = (await response.text()).split("\n\n")
    begin = next(i for i, each in enumerate(events) if each.startswith("data:"))
    assert ": keep-alive" in events[begin:]
    assert len([each for each in events if each.startswith("data:")]) == 3, "the role, the end, and [DONE]"
