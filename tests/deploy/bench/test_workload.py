import json
import random
from pathlib import Path

import pytest

from deploy.bench.workload import Even, HeavyTailed, Lengths, Stream, file_prompts, poisson_arrivals, random_prompts

LENGTHS = Lengths(Even(5, 9), Even(2, 4))


def test_random_prompts_have_the_lengths_asked_for_and_repeat_with_the_seed() -> None:
    prompts = random_prompts(200, LENGTHS, range(50), seed="1")
    assert {prompt.num_tokens for prompt in prompts} == {5, 6, 7, 8, 9}
    assert {prompt.max_tokens for prompt in prompts} == {2, 3, 4}
    assert all(0 <= token < 50 for prompt in prompts for token in prompt.content if isinstance(token, int))
    assert prompts == random_prompts(200, LENGTHS, range(50), seed="1")
    assert prompts != random_prompts(200, LENGTHS, range(50), seed="2")


def test_the_body_asks_for_exactly_that_many_tokens() -> None:
    prompt = random_prompts(1, LENGTHS, range(50), seed="1")[0]
    body = json.loads(prompt.body("m"))
    assert body["prompt"] == prompt.content
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (prompt.max_tokens, True, 0)
    assert body["stream_options"] == {"include_usage": True}


def test_file_prompts_are_lines_or_json_and_repeat(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text('a plain text\n\n{"prompt": "another", "max_tokens": 77}\n')
    prompts = file_prompts(path, 3, LENGTHS, seed="0")
    assert [prompt.content for prompt in prompts] == ["a plain text", "another", "a plain text"]
    assert prompts[1].max_tokens == 77
    assert prompts[0].num_tokens is None


def test_a_stream_is_a_rate_and_two_lengths() -> None:
    stream = Stream.parse("0.5:128/8")
    assert stream == Stream(0.5, Lengths.fixed(128, 8))
    assert str(stream) == "0.5 req/s of 128/8"
    for text in ("", "20", "20:128", "0:128/8", "nan:1/1", "x:1/1", "20:0/8", "20:1/2/3"):
        with pytest.raises(ValueError, match=r"20:128/8|at least 1"):
            Stream.parse(text)


def test_poisson_arrivals_ascend_at_the_rate() -> None:
    arrivals_s = poisson_arrivals(4000, 8.0, seed="3")
    assert arrivals_s == sorted(arrivals_s)
    assert arrivals_s[-1] == pytest.approx(500, rel=0.1)
    assert arrivals_s == poisson_arrivals(4000, 8.0, seed="3")


def test_heavy_tailed_lengths_are_many_short_and_few_long() -> None:
    rng = random.Random(3)
    drawn = sorted(HeavyTailed(1000, longest=20_000).draw(rng) for _ in range(4000))
    assert drawn[0] >= 1 and drawn[-1] == 20_000
    assert drawn[2000] < 400 and 7000 < drawn[3960] < 15_000
    assert 800 < sum(drawn) / 4000 < 1100
