import json
import random
import shlex
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest

from deploy.bench.load import Load
from deploy.bench.options import parse_args
from deploy.bench.workload import Even, HeavyTailed, Lengths, Stream, arrivals_at, file_prompts, random_prompts

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


def test_a_sampled_reply_is_asked_for_and_named() -> None:
    flags = shlex.split("--rate 24 --burstiness 0.2 --temperature 0.8 --top-p 0.95 --num-prompts 3 --output-range 2-9")
    load = Load(parse_args(flags, ""))
    assert load.name == "temperature 0.8, top-p 0.95: 24 req/s in bursts (0.2), 1024/2-9, 3 requests"
    for prompt in (*load.prompts(0), *load.warm_up()):
        body = json.loads(prompt.body("m"))
        assert (body["temperature"], body["top_p"], body["ignore_eos"]) == (0.8, 0.95, True)
    greedy = Load(parse_args(["--rate", "24"], ""))
    assert greedy.name == "24 req/s, 1024/128, 100 requests" and "top_p" not in json.loads(
        greedy.prompts(0)[0].body("m")
    )


@pytest.mark.parametrize("flags", ["--burstiness 0.2", "--rate 1 --burstiness 0", "--temperature -1", "--top-p 0.9"])
def test_sampling_and_bursts_that_have_no_meaning_are_refused(flags: str) -> None:
    mode = [] if "--rate" in flags else ["--all-at-once"]
    with pytest.raises(SystemExit):
        parse_args([*mode, *flags.split()], "")


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


@pytest.mark.parametrize("burstiness", [1.0, 0.2, 5.0])
def test_arrivals_ascend_at_the_rate_and_vary_as_much_as_asked_for(burstiness: float) -> None:
    arrivals_s = arrivals_at(20_000, 8.0, "3", burstiness)
    gaps_s = [after - before for before, after in pairwise(arrivals_s)]
    assert min(gaps_s) >= 0 and mean(gaps_s) == pytest.approx(1 / 8, rel=0.05)
    assert pstdev(gaps_s) / mean(gaps_s) == pytest.approx(burstiness**-0.5, rel=0.05)
    assert arrivals_s == arrivals_at(20_000, 8.0, "3", burstiness)


def test_arrivals_of_a_seed_stay_as_they_were_in_older_runs() -> None:
    assert arrivals_at(2, 8.0, "3") == pytest.approx([0.252885, 0.362372], abs=1e-6)


def test_heavy_tailed_lengths_are_many_short_and_few_long() -> None:
    rng = random.Random(3)
    drawn = sorted(HeavyTailed(1000, longest=20_000).draw(rng) for _ in range(4000))
    assert drawn[0] >= 1 and drawn[-1] == 20_000
    assert drawn[2000] < 400 and 7000 < drawn[3960] < 15_000
    assert 800 < sum(drawn) / 4000 < 1100
