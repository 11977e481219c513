"""What fields of the API do, seen by the openai client: whole and streamed, which must agree."""

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest

from common.base.errors import RequestError
from router.placement.capacity import most_tokens
from tests.router.conftest import EOS, Client, Cluster, StartCluster

PROMPT = "the quick brown fox"


async def events(cluster: Cluster, **fields: Any) -> list[Any]:
    """Every event of a stream as JSON, the end of it left out but seen."""
    body = {"prompt": PROMPT, "temperature": 0, "stream": True} | fields
    async with aiohttp.ClientSession(cluster.url) as session, session.post("/v1/completions", json=body) as response:
        assert response.status == 200
        text = await response.text()
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


async def answer(client: Client, **fields: Any) -> Any:
    """The first choice of a whole response, after seeing that a stream says the same."""
    extra = {"temperature": 0, "max_tokens": 40} | fields
    whole: Any = await client.completions.create(model="tiny", prompt=extra.pop("prompt", PROMPT), extra_body=extra)
    texts: dict[int, str] = {}
    last: dict[int, Any] = {}
    stream = await client.completions.create(
        model="tiny", prompt=fields.get("prompt", PROMPT), stream=True, extra_body=extra
    )
    async for chunk in stream:
        for choice in chunk.choices:
            assert choice.index not in last or not last[choice.index].finish_reason
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            last[choice.index] = choice
    assert texts == {choice.index: choice.text for choice in whole.choices}
    for choice in whole.choices:
        end = last[choice.index]
        assert (end.finish_reason, end.stop_reason) == (choice.finish_reason, choice.stop_reason)
    return whole.choices[0]


async def test_a_stop_string_is_named_and_shown_on_request(client: Client) -> None:
    whole = client.expected(PROMPT, max_tokens=40)
    stop = whole[20:23]
    before = whole[: whole.index(stop)]
    many = ["never", "Question:", "</s>", "\n\n\n", "Q:", stop]
    choice = await answer(client, stop=many)
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (before, "stop", stop)
    choice = await answer(client, stop=many, include_stop_str_in_output=True)
    assert (choice.text, choice.stop_reason) == (before + stop, stop)


async def test_log_probabilities_are_told_of_every_token_streamed_or_not(client: Client) -> None:
    whole = await answer(client, logprobs=2, max_tokens=12, return_token_ids=True, return_tokens_as_token_ids=True)
    told = whole.logprobs
    assert told.tokens == [f"token_id:{token_id}" for token_id in whole.token_ids] and len(told.tokens) == 12
    assert [top[token] for token, top in zip(told.tokens, told.top_logprobs, strict=True)] == told.token_logprobs
    assert {len(top) for top in told.top_logprobs} == {2}
    stream: Any = await client.completions.create(
        model="tiny", prompt=PROMPT, stream=True, logprobs=2, temperature=0, max_tokens=12
    )
    parts = [choice.logprobs async for chunk in stream for choice in chunk.choices]
    assert [value for part in parts for value in part.token_logprobs] == told.token_logprobs
    assert [offset for part in parts for offset in part.text_offset] == told.text_offset
    assert (await answer(client)).logprobs is None


async def test_log_probabilities_of_an_echoed_prompt_stand_before_those_of_the_text(client: Client) -> None:
    plain = await answer(client, logprobs=2, max_tokens=6)
    ids = client.ids(PROMPT)
    for max_tokens in (6, 0):
        whole = await answer(client, logprobs=2, max_tokens=max_tokens, echo=True)
        told, num = whole.logprobs, len(ids)
        assert whole.text == PROMPT + (plain.text if max_tokens else "")
        assert told.tokens[:num] == [client.tokenizer.decode([token_id]) for token_id in ids]
        assert told.token_logprobs[:num] == [None] + [-0.5] * (num - 1)
        assert told.top_logprobs[0] is None and {len(top) for top in told.top_logprobs[1:]} == {2}
        ends = [*told.text_offset[1:], len(whole.text)]
        assert "".join(whole.text[a:b] for a, b in zip(told.text_offset, ends, strict=True)) == whole.text
        assert told.tokens[num:] == (plain.logprobs.tokens if max_tokens else [])
        assert told.token_logprobs[num:] == (plain.logprobs.token_logprobs if max_tokens else [])
    stream: Any = await client.completions.create(
        model="tiny", prompt=PROMPT, stream=True, logprobs=2, echo=True, temperature=0, max_tokens=6
    )
    whole = await answer(client, logprobs=2, max_tokens=6, echo=True)
    parts = [choice.logprobs async for chunk in stream for choice in chunk.choices]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for part in parts for value in getattr(part, name)] == getattr(whole.logprobs, name)


async def test_prompt_logprobs_are_told_by_ids_with_ranks(client: Client, cluster: Cluster) -> None:
    ids = client.ids(PROMPT)
    fields = {"temperature": 0, "max_tokens": 2, "n": 2, "prompt_logprobs": 1}
    whole: Any = await client.completions.create(model="tiny", prompt=PROMPT, extra_body=fields)
    for choice in whole.choices:
        first, *others = choice.prompt_logprobs
        assert (
            first is None
            and choice.logprobs is None
            and [[*map(int, other)] for other in others] == [[token_id] for token_id in ids[1:]]
        )  # the likeliest is the token itself
        name = client.tokenizer.decode(ids[1:2])
        assert others[0][str(ids[1])] == {"logprob": -0.5, "rank": 2, "decoded_token": name}
    both: Any = await client.completions.create(
        model="tiny", prompt=PROMPT, extra_body=fields | {"n": 1, "echo": True, "logprobs": 3, "max_tokens": 0}
    )
    [choice] = both.choices
    assert {len(top) for top in choice.logprobs.top_logprobs[1:]} == {3}
    assert choice.prompt_logprobs == whole.choices[0].prompt_logprobs
    assert (both.usage.prompt_tokens, both.usage.completion_tokens) == (len(ids), 0)
    one: Any = await client.completions.create(
        model="tiny", prompt=ids[:1], extra_body=fields | {"echo": True, "logprobs": 3, "max_tokens": 0, "n": 1}
    )
    assert one.choices[0].prompt_logprobs == one.choices[0].logprobs.token_logprobs == [None]
    with pytest.raises(openai.BadRequestError, match="at most 131072"):
        fields = {"n": 128, "prompt_logprobs": 20}
        await client.completions.create(model="tiny", prompt=ids[:1] * 60, extra_body=fields)


async def test_a_stop_token_of_the_client_is_named_and_the_models_own_is_not(client: Client) -> None:
    ids = client.outputs(PROMPT, max_tokens=40, stop_token_ids=())
    stop = ids[10]
    num_before = ids.index(stop)
    before = client.tokenizer.decode(ids[:num_before])
    choice = await answer(client, stop_token_ids=[stop], ignore_eos=True)
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (before, "stop", stop)
    choice = await answer(client, stop_token_ids=[stop], ignore_eos=True, include_stop_str_in_output=True)
    assert choice.text == client.tokenizer.decode(ids[: num_before + 1])
    last = next(i for i in range(1, client.model.vocab_size) if client.outputs([i], max_tokens=1) == [EOS])
    choice = await answer(client, prompt=[last], stop_token_ids=[EOS])
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", None)
    choice = await answer(client, prompt=[last], stop_token_ids=[EOS], ignore_eos=True)
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", EOS)


async def test_special_tokens_are_shown_on_request(client: Client) -> None:
    last = next(i for i in range(1, client.model.vocab_size) if client.outputs([i], max_tokens=1) == [EOS])
    ids = client.outputs([last], max_tokens=40, stop_token_ids=())
    assert ids[0] == EOS
    for skip in (True, False):
        choice = await answer(client, prompt=[last], ignore_eos=True, skip_special_tokens=skip)
        assert choice.text == client.tokenizer.decode(ids, skip_special_tokens=skip)
        assert choice.text.startswith("<|endoftext|>") is not skip


async def test_echo_puts_the_prompt_before_the_text(client: Client) -> None:
    text = client.expected(PROMPT, max_tokens=40)
    ids = client.ids(PROMPT)
    for prompt in (PROMPT, ids):
        assert (await answer(client, prompt=prompt, echo=True)).text == PROMPT + text
    stop = text[20:23]
    choice = await answer(client, echo=True, stop=[stop, PROMPT[4:9]])
    assert (choice.text, choice.stop_reason) == (PROMPT + text[: text.index(stop)], stop)
    choice = await answer(
        client, prompt=[*ids, EOS, *ids], echo=True, truncate_prompt_tokens=len(ids) + 1, max_tokens=1
    )
    assert choice.text.startswith("<|endoftext|>" + PROMPT)
    assert (await answer(client, echo=True, n=2)).text == PROMPT + text
    last = next(i for i in range(1, client.model.vocab_size) if client.outputs([i], max_tokens=1) == [EOS])
    assert (await answer(client, prompt=[last], echo=True)).text == client.tokenizer.decode([last])


async def test_no_tokens_and_echo_give_the_prompt_alone(client: Client, cluster: Cluster) -> None:
    for worker in cluster.workers:
        worker.mute = True
    fields = {"prompt": [PROMPT, "the lazy dog"], "echo": True, "max_tokens": 0}
    choice = await answer(client, **fields)
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    whole = await client.completions.create(model="tiny", extra_body=fields, prompt="")
    assert [choice.text for choice in whole.choices] == fields["prompt"]
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
        len(client.ids(PROMPT)) + len(client.ids("the lazy dog")),
        0,
    )
    assert cluster.service.dispatcher.num_active == 0


async def test_usage_stands_in_the_last_chunk_or_in_each(client: Client, cluster: Cluster) -> None:
    num_prompt = len(client.ids(PROMPT))
    assert not any("usage" in chunk for chunk in await events(cluster, stream_options={}))
    *chunks, last = await events(cluster, stream_options={"include_usage": True})
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 16)
    both = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await events(cluster, stream_options=both, prompt=[PROMPT, PROMPT])
    seen: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        assert chunk["usage"]["prompt_tokens"] == num_prompt
        seen[chunk["choices"][0]["index"]].append(chunk["usage"]["completion_tokens"])
    for counts in seen.values():
        assert (counts, counts[-1]) == (sorted(set(counts)), 16)
    assert last["usage"] == {
        "prompt_tokens": 2 * num_prompt,
        "completion_tokens": 32,
        "total_tokens": 2 * num_prompt + 32,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_token_ids_are_returned_on_request(client: Client, cluster: Cluster) -> None:
    ids = client.outputs(PROMPT, max_tokens=16)
    choice = await answer(client, return_token_ids=True, max_tokens=16)
    assert (choice.prompt_token_ids, choice.token_ids) == (client.ids(PROMPT), ids)
    choices = [chunk["choices"][0] for chunk in await events(cluster, return_token_ids=True)]
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == ids
    assert [choice.get("prompt_token_ids") for choice in choices] == [client.ids(PROMPT)] + [None] * (len(choices) - 1)


async def test_texts_and_token_ids_in_one_batch_of_many(client: Client) -> None:
    prompts: list[Any] = [PROMPT, client.ids("the lazy dog"), "schöne Grüße"] * 341 + [[7]]
    whole = await client.completions.create(
        model="tiny", prompt="", max_tokens=2, temperature=0, extra_body={"prompt": prompts}
    )
    assert len(whole.choices) == 1024
    expected = [client.expected(prompt, max_tokens=2) for prompt in prompts]
    assert [choice.text for choice in whole.choices] == expected


async def test_as_many_texts_of_one_prompt_as_there_may_be(client: Client) -> None:
    whole = await client.completions.create(model="tiny", prompt=PROMPT, n=128, best_of=1, max_tokens=3, seed=1)
    assert [choice.index for choice in whole.choices] == [*range(128)]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(client.ids(PROMPT))


async def test_explicit_nulls_and_values_that_change_nothing_are_taken(client: Client) -> None:
    nulls = dict.fromkeys(("logprobs", "seed", "stop", "suffix", "logit_bias", "best_of", "user", "stream_options"))
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0, "n": 1, "top_p": 1, "min_tokens": 0}
    choice = await answer(client, **nulls, **neutral)
    assert choice.text == client.expected(PROMPT, max_tokens=40)
    with pytest.raises(openai.BadRequestError, match="did you mean max_tokens") as caught:
        await client.completions.create(model="tiny", prompt=PROMPT, extra_body={"max_token": 5})
    assert (caught.value.param, caught.value.code) == ("max_token", "unknown_field")


@pytest.mark.medium
@pytest.mark.parametrize(("most_urgent", "refused"), [(0, -1), (-5, -6)])
async def test_nobody_is_more_urgent_than_the_server_lets_clients_be(
    start_cluster: StartCluster, most_urgent: int, refused: int
) -> None:
    cluster = await start_cluster(min_priority=most_urgent)
    cluster.decode(transport="none")
    await cluster.until(lambda: most_tokens(cluster.service.pool), "a worker")
    asked: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    }
    async with aiohttp.ClientSession(cluster.url) as session:
        for path, fields in asked.items():
            for priority, status in ((most_urgent, 200), (9, 200), (refused, 400)):
                body = {"priority": priority, "max_tokens": 1, **fields}
                async with session.post(path, json=body) as response:
                    answer = await response.json()
                    assert response.status == status, answer
            assert answer["error"]["param"] == "priority" and "router.min_priority" in answer["error"]["message"]


async def test_an_error_inside_a_stream_is_an_event_of_its_own(client: Client, cluster: Cluster) -> None:
    cluster.workers[1].mute = True
    reading = asyncio.create_task(events(cluster, prompt=client.visible_prompt()))
    await cluster.until(lambda: any(c.output.token_ids for c in cluster.service.dispatcher.active), "a first token")
    cluster.service.dispatcher.fail_all(RequestError("gone", code="worker_lost", status=503))
    chunks = await reading
    assert chunks[-1] == {"error": {"message": "gone", "type": "server_error", "param": None, "code": "worker_lost"}}


async def test_after_the_death_of_a_worker_nothing_is_shown_twice_and_the_same_ends_the_text(
    client: Client, start_cluster: StartCluster
) -> None:
    cluster = await start_cluster()
    cluster.prefill()
    first = cluster.decode(most_outputs=5)
    await cluster.until_paths(1)
    ids = client.outputs(PROMPT, max_tokens=40, stop_token_ids=())
    stop = max(set(ids), key=ids.index)  # the last that is new
    wanted = {"echo": True, "return_token_ids": True, "stop_token_ids": [stop], "include_stop_str_in_output": True}
    usage = {"include_usage": True, "continuous_usage_stats": True}
    reading = asyncio.create_task(events(cluster, max_tokens=40, ignore_eos=True, n=2, stream_options=usage, **wanted))
    active = cluster.service.dispatcher.active
    await cluster.until(lambda: [len(c.output.token_ids) for c in active] == [5, 5], "a few tokens")
    await asyncio.to_thread(first.kill)
    cluster.decode("decode-1")
    *chunks, last = await reading
    num_outputs = ids.index(stop) + 1
    for index in range(2):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in choices) == PROMPT + client.tokenizer.decode(ids[:num_outputs])
        assert [token_id for choice in choices for token_id in choice["token_ids"]] == ids[:num_outputs]
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", stop)
    assert last["usage"]["completion_tokens"] == 2 * num_outputs
    assert cluster.service.metrics.replays.labels("worker_lost")._value.get() == 2


async def test_the_client_that_blocks(client: Client, cluster: Cluster) -> None:
    def ask() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=100.0) as blocking:
            fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
            whole = blocking.completions.create(**fields)
            streamed = "".join(
                choice.text for chunk in blocking.completions.create(stream=True, **fields) for choice in chunk.choices
            )
            with pytest.raises(openai.BadRequestError):
                blocking.completions.create(**fields, suffix="tail")
            return whole.choices[0].text, streamed

    expected = client.expected(PROMPT, max_tokens=40)
    assert await asyncio.to_thread(ask) == (expected, expected)
