"""Prompts on one host and decoding on another, over a cable that delays, loses, reorders, or carries one way only."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Completion, Reference, complete_all, prompts
from tests.e2e.test_prefixes import ANY_LENGTH, NUM_OUT
from tests.e2e.two_hosts import BACK, FRONT, TwoHosts
from tests.support.hosts import Hosts, needs_hosts
from tests.support.wire import Counts, Weather, Wire

pytestmark = [pytest.mark.medium, needs_hosts()]

Checkpoint = Callable[[str], tuple[Path, Any]]
SILENCE_S = 3.0
FLAGS = (*ANY_LENGTH, "--kv-min-gb-per-s", "0")
WEATHERS = {
    "20 ms": Weather(delay_s=0.02),
    "1 % lost": Weather(delay_s=0.001, loss=0.01),
    "out of order": Weather(delay_s=0.01, overtaking=0.25),
    "10 Mbit/s": Weather(delay_s=0.001, mbit_per_s=10),
}
SIDES = {"deaf": Weather(is_deaf=True), "mute": Weather(is_mute=True)}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(FRONT, BACK, wired=BACK) as hosts:
        yield hosts


@pytest.fixture
def wire(hosts: Hosts) -> Iterator[Wire]:
    assert hosts.wire is not None
    yield hosts.wire
    hosts.wire.set(Weather())


@pytest.mark.parametrize("name", WEATHERS)
async def test_texts_are_those_of_one_host_in_any_weather(
    name: str, hosts: Hosts, wire: Wire, checkpoint: Checkpoint
) -> None:
    """The path is proven, and pulls go on, while frames are late or lost."""
    directory, model = checkpoint("qwen3-tied")
    reference, texts = Reference(directory, model), prompts(6, 40, 160, seed=74)
    wire.set(WEATHERS[name])
    with TwoHosts(hosts, directory, *FLAGS, silence_s=30.0).start_two() as system:
        answers = await complete_all(system.url, texts, max_tokens=NUM_OUT, ignore_eos=True)
        assert [each.text for each in answers] == [reference.text(p, NUM_OUT, ignore_eos=True) for p in texts]
        await asyncio.to_thread(system.until, system.all_blocks_free)
        [path] = system.health()["kv_paths"]
        assert (path["transport"], path["error"]) == ("nixl tcp", "")
    assert_happened(wire.set(Weather()), WEATHERS[name])


@pytest.mark.parametrize("side", SIDES)
async def test_a_host_that_is_deaf_or_mute_for_a_while_costs_no_text(
    side: str, hosts: Hosts, wire: Wire, checkpoint: Checkpoint
) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, texts = Reference(directory, model), prompts(6, 100, 200, seed=75)
    with TwoHosts(hosts, directory, *FLAGS, silence_s=SILENCE_S).start_two() as system:
        wire.set(Weather(mbit_per_s=2))
        streams = [Completion() for _ in texts]
        task = asyncio.create_task(complete_all(system.url, texts, streams, max_tokens=NUM_OUT, ignore_eos=True))
        await asyncio.to_thread(system.until, lambda: system.num_active() == len(texts))
        await asyncio.sleep(0.3)
        wire.set(SIDES[side])
        await asyncio.to_thread(system.until, lambda: not system.health()["workers"]["decode"])
        assert wire.set(Weather()).lost
        answers = await task
        assert [each.error for each in answers] == [None] * len(texts)
        assert [each.text for each in answers] == [reference.text(p, NUM_OUT, ignore_eos=True) for p in texts]
        await asyncio.to_thread(system.wait_ready, 1, 1)


def assert_happened(counts: Counts, weather: Weather) -> None:
    assert counts.delayed and bool(counts.lost) >= bool(weather.loss)
    assert bool(counts.overtaking) == bool(weather.overtaking)
