"""Prompts on one host and decoding on another: texts as on one host, whatever happens to the network between them."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Completion, Reference, complete_all, prompts
from tests.e2e.test_prefixes import ANY_LENGTH, NUM_OUT
from tests.e2e.test_replies import pulled
from tests.e2e.two_hosts import BACK, BACK_MEMORY, DISPATCHER_PORT, FRONT, TwoHosts
from tests.support.hosts import Hosts, needs_hosts

pytestmark = [pytest.mark.medium, needs_hosts()]

Checkpoint = Callable[[str], tuple[Path, Any]]
SLOW_MBIT_PER_S = 2
SILENCE_S = 3.0
"""`net.worker_timeout_s` where something is to be noticed."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(FRONT, BACK) as hosts:
        yield hosts


async def test_texts_between_hosts_are_those_of_one_and_replies_come_back(hosts: Hosts, checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, history = Reference(directory, model), prompts(4, 40, 120, seed=71)
    with TwoHosts(hosts, directory, *ANY_LENGTH, silence_s=30.0).start_two() as system:
        [path] = system.health()["kv_paths"]
        assert (path["transport"], path["error"]) == ("nixl tcp", "") and path["gb_per_s"] > 0
        for _ in range(2):
            answers = await complete_all(
                system.url, history, max_tokens=NUM_OUT, ignore_eos=True, return_token_ids=True
            )
            assert [each.text for each in answers] == [reference.text(p, NUM_OUT, ignore_eos=True) for p in history]
            history = [prompt + answer.ids + prompt[:20] for prompt, answer in zip(history, answers, strict=True)]
            await asyncio.to_thread(system.until, system.all_blocks_free)
        assert pulled(system, "decode-0") > 0
        await asyncio.to_thread(system.until, lambda: "replies can be taken" in system.log("prefill-0"))


async def test_a_front_of_the_other_host_answers_as_the_router_does(hosts: Hosts, checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, asked = Reference(directory, model), prompts(6, 40, 120, seed=73)
    with TwoHosts(hosts, directory, silence_s=30.0) as system:
        endpoint = f"tcp://{hosts.addresses[FRONT]}:{DISPATCHER_PORT}"
        system.start_router(0, "--router-front-endpoint", endpoint)
        system.start_memory()
        system.homes = {"decode-0": BACK_MEMORY}
        for name in ("prefill-0", "decode-0"):
            system.start_worker(name)
        await asyncio.to_thread(system.wait_ready, 1, 1)
        url = await asyncio.to_thread(system.start_front)
        answers = await complete_all(url, asked, max_tokens=NUM_OUT, ignore_eos=True)
        assert [each.text for each in answers] == [reference.text(p, NUM_OUT, ignore_eos=True) for p in asked]
        await asyncio.to_thread(system.until, system.all_blocks_free)


def cut(system: TwoHosts) -> None:
    system.hosts.cut(BACK)
    system.until(lambda: not system.health()["workers"]["decode"])
    system.hosts.mend(BACK)


def gate_dies(system: TwoHosts) -> None:
    pid = system.processes["memory"].pid
    [gate] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(gate), signal.SIGKILL)


def host_dies(system: TwoHosts) -> None:
    for name in ("decode-0", BACK_MEMORY):
        system.kill(name)
    system.start_memory(BACK_MEMORY)
    system.start_worker("decode-0")


FAULTS = {"link": cut, "gate": gate_dies, "host": host_dies}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_of_the_network_or_of_a_host_costs_no_text(
    fault: str, hosts: Hosts, checkpoint: Checkpoint
) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, texts = Reference(directory, model), prompts(6, 100, 200, seed=72)
    with TwoHosts(hosts, directory, *ANY_LENGTH, "--kv-min-gb-per-s", "0", silence_s=SILENCE_S).start_two() as system:
        hosts.slow(FRONT, SLOW_MBIT_PER_S)
        streams = [Completion() for _ in texts]
        task = asyncio.create_task(complete_all(system.url, texts, streams, max_tokens=NUM_OUT, ignore_eos=True))
        try:
            await asyncio.to_thread(system.until, lambda: system.num_active() == len(texts))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(FAULTS[fault], system)
        finally:
            hosts.free(FRONT)
        answers = await task
        assert [each.error for each in answers] == [None] * len(texts)
        assert [each.text for each in answers] == [reference.text(p, NUM_OUT, ignore_eos=True) for p in texts]
        await asyncio.to_thread(system.wait_ready, 1, 1)
