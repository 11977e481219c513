"""What fields of the API do, seen by the openai client: whole and streamed, which must agree."""

from typing import Any

from tests.router.conftest import EOS, Client

PROMPT = "the quick brown fox"


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
