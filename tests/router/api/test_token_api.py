"""/tokenize, /detokenize and the small endpoints, over HTTP; short bodies and long ones are answered alike."""

import io
import json
import re
from typing import Any

import aiohttp
import pytest
import tokenizers

from router.reading.bodies import NUM_FREE_BYTES
from tests.router.conftest import MAX_MODEL_LEN, Cluster, StartCluster

JSON = {"Content-Type": "application/json"}
USER = {"role": "user", "content": "the fox"}
TEXT = "the quick brown fox; schöne Grüße aus Köln, 你好 🎉"


@pytest.fixture
async def session(start_cluster: StartCluster) -> Any:
    cluster = await start_cluster()
    async with aiohttp.ClientSession(cluster.url) as session:
        yield session


async def ask(session: aiohttp.ClientSession, path: str, body: Any, num_padding: int = 0) -> tuple[int, Any]:
    data = io.BytesIO((" " * num_padding + json.dumps(body)).encode())
    async with session.post(path, data=data, headers=JSON) as response:
        return response.status, await response.json()


LENGTHS = pytest.mark.parametrize("num_padding", [0, 2 * NUM_FREE_BYTES], ids=["short", "long"])


@pytest.mark.medium
@LENGTHS
async def test_a_text_goes_there_and_back(
    session: aiohttp.ClientSession, tokenizer: tokenizers.Tokenizer, num_padding: int
) -> None:
    ids = tokenizer.encode(TEXT).ids
    status, tokens = await ask(session, "/tokenize", {"prompt": TEXT, "model": "tiny"}, num_padding)
    wanted = {"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids, "token_strs": None}
    assert (status, tokens) == (200, wanted)
    _, named = await ask(session, "/tokenize", {"prompt": TEXT, "return_token_strs": True}, num_padding)
    assert named["token_strs"] == tokenizer.encode(TEXT).tokens
    assert await ask(session, "/detokenize", named, num_padding) == (200, {"prompt": TEXT})
    assert await ask(session, "/detokenize", {"tokens": [*ids, 0]}, num_padding) == (
        200,
        {"prompt": f"{TEXT}<|endoftext|>"},
    )


WRONG: list[tuple[str, Any, str | None, str]] = [
    ("/tokenize", {}, "prompt", "missing_field"),
    ("/tokenize", {"prompt": [1]}, "prompt", "invalid_value"),
    ("/tokenize", {"prompt": "a", "add_special_token": True}, "add_special_token", "unknown_field"),
    ("/tokenize", {"prompt": "a", "model": "other"}, "model", "model_not_found"),
    ("/tokenize", {"messages": []}, "messages", "invalid_value"),
    ("/tokenize", {"messages": [USER], "prompt": "a"}, "prompt", "unknown_field"),
    ("/tokenize", {"messages": [USER | {"role": "tool", "tool_call_id": "1"}]}, "messages", "chat_template_error"),
    ("/tokenize", {"messages": [USER], "chat_template": "{{ 1 }}"}, "chat_template", "unsupported_value"),
    ("/tokenize", {"prompt": "x" * 17 * MAX_MODEL_LEN}, "prompt", "context_length_exceeded"),
    ("/tokenize", [], None, "invalid_json"),
    ("/detokenize", {}, "tokens", "missing_field"),
    ("/detokenize", {"tokens": [1, -1]}, "tokens", "invalid_value"),
    ("/detokenize", {"tokens": [100_000]}, "tokens", "invalid_value"),
    ("/detokenize", {"tokens": [1] * (MAX_MODEL_LEN + 1)}, "tokens", "context_length_exceeded"),
]


@pytest.mark.medium
@LENGTHS
async def test_what_is_wrong_is_named(session: aiohttp.ClientSession, num_padding: int) -> None:
    for path, body, param, code in WRONG:
        status, answer = await ask(session, path, body, num_padding)
        assert (status // 100, answer["error"]["param"], answer["error"]["code"]) == (4, param, code), (path, body)


@pytest.mark.medium
@LENGTHS
async def test_of_a_conversation_they_are_those_that_an_answer_follows(
    session: aiohttp.ClientSession, tokenizer: tokenizers.Tokenizer, num_padding: int
) -> None:
    messages = [{"role": "system", "content": "Be brief<|endoftext|>"}, USER]
    written: dict[str, dict[str, Any]] = {
        "system: Be brief<|endoftext|>\nuser: the fox\nassistant: now": {"chat_template_kwargs": {"be_quick": True}},
        "system: Be brief<|endoftext|>\nuser: the fox\n": {"add_generation_prompt": False},
        "system: Be brief<|endoftext|>\nuser: the fox": {"continue_final_message": True},
    }
    for text, fields in written.items():
        asked = {"messages": messages, "return_token_strs": True, **fields}
        status, tokens = await ask(session, "/tokenize", asked, num_padding)
        assert (status, tokens["count"]) == (200, len(tokens["tokens"]))
        assert 0 not in tokens["tokens"] and len(tokens["token_strs"]) == tokens["count"]
        assert tokenizer.decode(tokens["tokens"], skip_special_tokens=False) == text


async def test_an_empty_text_has_no_tokens(session: aiohttp.ClientSession) -> None:
    assert (await ask(session, "/tokenize", {"prompt": ""}))[1]["tokens"] == []
    assert await ask(session, "/detokenize", {"tokens": []}) == (200, {"prompt": ""})


async def test_the_small_endpoints(cluster: Cluster) -> None:
    async with aiohttp.ClientSession(cluster.url) as session:
        fields = {"prompt": "the fox", "max_tokens": 3, "temperature": 0}
        texts = [(await ask(session, path, fields))[1]["choices"] for path in ("/v1/completions", "/v1/completions/")]
        assert texts[0] == texts[1]
        for method in ("GET", "POST"):
            async with session.request(method, "/ping") as response:
                assert response.status == 200
        async with session.get("/version") as response:
            assert re.match(r"\d+\.\d+", (await response.json())["version"])
        cluster.workers[1].mute = True
        running = session.post("/v1/completions", json={"prompt": [[1], [2]], "stream": True})
        async with running, session.get("/load") as response:
            assert await response.json() == {"server_load": 2}
        await cluster.until(lambda: not cluster.service.dispatcher.num_active, "nothing in flight")
        async with session.get("/load") as response:
            assert await response.json() == {"server_load": 0}
