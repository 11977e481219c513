"""A worker ends at any step of what it says and hears: no text differs, no block is lost, and nobody breaks a rule."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from common.wire.messages.handoff import DecodeRequest, KVPathResult, KVPoolExport, KVProgress
from common.wire.messages.memory import (
    BlocksFreed,
    BlocksLeased,
    BlocksWanted,
    KVAccepted,
    KVOffer,
    KVReceived,
    MemoryHello,
    MemoryKnock,
    MemoryWelcome,
    PoolLeft,
    PoolRegion,
    PoolShortage,
    PoolWanted,
    WeightsFilled,
    WeightsProgress,
    WeightsRegion,
    WeightsWanted,
)
from common.wire.messages.worker import (
    Abort,
    DecodePeer,
    Inquiry,
    InquiryReply,
    KVPathReport,
    Message,
    PeerGone,
    PrefillRequest,
    StillBound,
    TokenBatch,
    Welcome,
    WorkerGone,
    WorkerLeaving,
    WorkerReady,
)
from tests.e2e.client import Completion, Reference, complete, complete_all, prompts
from tests.e2e.doomed import Doom, Moment, has_come_true
from tests.e2e.system import START_TIMEOUT_S, TIMEOUT_S, System
from tests.support.marks import first_then

pytestmark = pytest.mark.medium

Checkpoint = Callable[[str], tuple[Path, Any]]
Texts = list[tuple[list[int], str]]
"""Prompts, and what must follow them."""
BLOCK_BYTES = 3 * 2 * 16 * 2 * 32 * 4
FEW_BLOCKS = 72
"""So few that workers wait for one another's."""
HEARTBEAT_S = 0.05
UNHEARD_S = 10 * HEARTBEAT_S
"""Of whom nothing is heard for so long, it is surely asked."""
FLAGS = (
    "--prefill-max-batch-tokens", "64", "--decode-max-num-seqs", "3", "--net-heartbeat-s", str(HEARTBEAT_S),
    "--kv-pool-bytes", str(FEW_BLOCKS * BLOCK_BYTES), "--worker-drain-s", "600",
)  # fmt: skip
ROUTER_FLAGS = ("--router-max-attempts", "100", "--net-heartbeat-s", str(HEARTBEAT_S))
"""To the router, who has bad luck looks like a request that kills workers. It asks soon when it hears nothing."""
MAX_TOKENS = 30
WORKERS = ("prefill-0", "decode-0", "decode-1")
BEFORE, AFTER, GOT = Moment


class Doomed(System):
    """Its workers end where a test says."""

    def start_worker(self, name: str, *flags: str, module: str = "") -> None:
        super().start_worker(name, *flags, module=module or "tests.e2e.doomed")

    def complete(self) -> "Doomed":
        """Start whoever is missing, and wait until nothing is left of what was before."""
        if "router" not in self.processes:
            self.start_router(0, *ROUTER_FLAGS)
        for name in WORKERS:
            if name not in self.processes:
                self.start_worker(name)
        self.wait_ready(1, 2)
        assert "is refused" not in self.logs(), "somebody broke the rules of the memory server"
        return self

    def ended(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Wait until that worker ends as foretold; a worker that does not is killed, lest it fails the next test."""
        process = self.processes.pop(name)
        try:
            assert process.wait(TIMEOUT_S) == -number, self.log(name)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def texts(checkpoint: Checkpoint) -> Texts:
    directory, model = checkpoint("qwen3-tied")
    reference = Reference(directory, model)
    return [(p, reference.text(p, MAX_TOKENS, ignore_eos=True)) for p in prompts(8, 100, 200, seed=5)]


def systems(checkpoint: Checkpoint, *flags: str, apart: bool = False, silence_s: float = 60.0) -> Iterator[Doomed]:
    with Doomed(checkpoint("qwen3-tied")[0], *FLAGS, *flags, silence_s=silence_s) as system:
        system.homes = {name: "memory-decode" for name in WORKERS if apart and name != "prefill-0"}
        yield system


@pytest.fixture(scope="module")
def sharing(checkpoint: Checkpoint) -> Iterator[Doomed]:
    """One pool, one server."""
    yield from systems(checkpoint)


@pytest.fixture(scope="module")
def pulling(checkpoint: Checkpoint) -> Iterator[Doomed]:
    """Two pools, two servers."""
    yield from systems(checkpoint, apart=True)


async def all_are_answered(system: Doomed, texts: Texts) -> None:
    """Ask for every text at once, and compare the answers."""
    asked = [prompt for prompt, _ in texts]
    async with asyncio.timeout(TIMEOUT_S):
        completions = await complete_all(system.url, asked, max_tokens=MAX_TOKENS, ignore_eos=True)
    assert [completion.error for completion in completions] == [None] * len(texts)
    assert [completion.text for completion in completions] == [text for _, text in texts]


async def all_is_well(system: Doomed, texts: Texts) -> None:
    """Some ask and get their texts, while others leave who have asked the same; until both is done."""
    async with asyncio.timeout(TIMEOUT_S), aiohttp.ClientSession() as session:
        streams = [Completion() for _ in range(3)]
        impatient = [
            asyncio.create_task(complete(session, system.url, texts[i][0], stream, max_tokens=300, ignore_eos=True))
            for i, stream in enumerate(streams)
        ]
        task = asyncio.create_task(all_are_answered(system, texts))
        while not all(s.num_tokens > 1 or leaver.done() for s, leaver in zip(streams, impatient, strict=True)):
            await asyncio.sleep(0.005)
        for leaver in impatient:
            leaver.cancel()
        await asyncio.gather(*impatient, return_exceptions=True)
        await task


async def survives(system: Doomed, texts: Texts, name: str, doom: Doom) -> None:
    """A worker ends amid its work, and all is well."""
    system.complete()
    doom.foretell(system.directory.name, name)
    await all_is_well(system, texts)
    await asyncio.to_thread(system.ended, name)
    await asyncio.to_thread(system.complete)


STEPS = [
    ("prefill-0", GOT, PrefillRequest, 3),
    ("prefill-0", BEFORE, BlocksWanted, 1),
    ("prefill-0", AFTER, BlocksWanted, 1),
    ("prefill-0", GOT, BlocksLeased, 2),
    ("prefill-0", GOT, PoolShortage, 2),
    ("prefill-0", BEFORE, KVOffer, 2),
    ("prefill-0", AFTER, KVOffer, 2),
    ("prefill-0", BEFORE, TokenBatch, 2),
    ("prefill-0", AFTER, TokenBatch, 2),
    ("prefill-0", GOT, KVReceived, 2),
    ("prefill-0", GOT, Abort, 1),
    ("prefill-0", AFTER, MemoryKnock, 1),
    ("decode-0", GOT, DecodeRequest, 2),
    ("decode-0", GOT, KVOffer, 2),
    ("decode-0", BEFORE, KVAccepted, 2),
    ("decode-0", AFTER, KVAccepted, 2),
    ("decode-0", BEFORE, TokenBatch, 9),
    ("decode-0", AFTER, TokenBatch, 9),
    ("decode-0", BEFORE, BlocksWanted, 2),
    ("decode-0", AFTER, BlocksWanted, 2),
    ("decode-0", GOT, BlocksLeased, 2),
    ("decode-0", GOT, PoolShortage, 2),
    ("decode-0", BEFORE, BlocksFreed, 1),
    ("decode-0", AFTER, BlocksFreed, 1),
    ("decode-0", GOT, Abort, 1),
    ("decode-0", GOT, MemoryKnock, 1),
]


@pytest.mark.parametrize(("name", "moment", "kind", "number"), first_then(pytest.mark.slow, STEPS, is_row=True))
async def test_at_every_step_in_a_shared_pool(
    name: str, moment: Moment, kind: type[Message], number: int, sharing: Doomed, texts: Texts
) -> None:
    await survives(sharing, texts, name, Doom(moment, kind, number))


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
@pytest.mark.parametrize(("moment", "kind"), [(GOT, Inquiry), (AFTER, InquiryReply)])
async def test_when_it_is_asked_what_it_has(
    name: str, moment: Moment, kind: type[Message], sharing: Doomed, texts: Texts
) -> None:
    """As it is when nothing was heard of it for a while. Nobody leaves, lest it has nothing left to be asked of."""
    directory = sharing.complete().directory.name
    amid = Doom(GOT, PrefillRequest, 2) if name == "prefill-0" else Doom(AFTER, TokenBatch, 3)
    amid._replace(ends_by=signal.SIGSTOP).foretell(directory, name)
    asked = asyncio.create_task(all_are_answered(sharing, texts))
    await asyncio.to_thread(sharing.until, lambda: has_come_true(directory, name))
    Doom(moment, kind).foretell(directory, name)
    await asyncio.sleep(UNHEARD_S)
    assert await asyncio.to_thread(sharing.num_active) > 0, "the router had its turn since, and asked"
    sharing.processes[name].send_signal(signal.SIGCONT)
    await asked
    await asyncio.to_thread(sharing.ended, name)
    await asyncio.to_thread(sharing.complete)


PULLS = [
    ("prefill-0", BEFORE, KVProgress, 3),
    ("prefill-0", AFTER, KVProgress, 3),
    ("prefill-0", BEFORE, KVOffer, 2),
    ("prefill-0", AFTER, KVOffer, 2),
    ("decode-0", GOT, KVProgress, 3),
    ("decode-0", GOT, KVOffer, 2),
    ("decode-0", BEFORE, KVReceived, 2),
    ("decode-0", AFTER, KVReceived, 2),
    ("decode-0", BEFORE, KVAccepted, 2),
    ("decode-0", AFTER, KVAccepted, 2),
    ("decode-0", BEFORE, BlocksFreed, 2),
    ("decode-0", AFTER, BlocksFreed, 2),
]


@pytest.mark.parametrize(("name", "moment", "kind", "number"), first_then(pytest.mark.slow, PULLS, is_row=True))
async def test_at_every_step_from_pool_to_pool(
    name: str, moment: Moment, kind: type[Message], number: int, pulling: Doomed, texts: Texts
) -> None:
    await survives(pulling, texts, name, Doom(moment, kind, number))


STARTS = [
    ("decode-0", AFTER, MemoryHello),
    ("decode-0", GOT, MemoryWelcome),
    ("decode-0", AFTER, WeightsWanted),
    ("decode-0", GOT, WeightsRegion),
    ("decode-0", AFTER, PoolWanted),
    ("decode-0", GOT, PoolRegion),
    ("decode-0", AFTER, BlocksWanted),
    ("decode-0", GOT, BlocksLeased),
    ("decode-0", AFTER, WorkerReady),
    ("decode-0", GOT, Welcome),
    ("decode-0", GOT, KVPoolExport),
    ("decode-0", BEFORE, KVPathResult),
    ("decode-0", AFTER, KVPathReport),
    ("prefill-0", GOT, DecodePeer),
    ("prefill-0", AFTER, KVPoolExport),
    ("prefill-0", GOT, KVPathResult),
]


@pytest.mark.parametrize(("name", "moment", "kind"), first_then(pytest.mark.slow, STARTS, is_row=True))
async def test_at_every_step_of_its_start(
    name: str, moment: Moment, kind: type[Message], sharing: Doomed, texts: Texts
) -> None:
    await asyncio.to_thread(sharing.complete().kill, name)
    Doom(moment, kind).foretell(sharing.directory.name, name)
    sharing.start_worker(name)
    await all_is_well(sharing, texts)
    await asyncio.to_thread(sharing.ended, name)
    await asyncio.to_thread(sharing.complete)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
@pytest.mark.parametrize(
    ("moment", "kind"),
    [
        (AFTER, WorkerLeaving),
        (GOT, StillBound),
        (BEFORE, PoolLeft),
        (AFTER, PoolLeft),
        (BEFORE, WorkerGone),
    ],
)
async def test_at_every_step_of_its_leaving(
    name: str, moment: Moment, kind: type[Message], sharing: Doomed, texts: Texts
) -> None:
    Doom(moment, kind).foretell(sharing.complete().directory.name, name)
    asked = asyncio.create_task(all_is_well(sharing, texts))
    await asyncio.to_thread(sharing.until, lambda: sharing.num_active() > 0 or asked.done())
    sharing.processes[name].terminate()
    await asked
    await asyncio.to_thread(sharing.ended, name)
    await asyncio.to_thread(sharing.complete)


@pytest.mark.parametrize(("name", "first"), [("decode-0", "prefill-0"), ("prefill-0", "decode-1")])
async def test_when_it_hears_of_the_death_of_another(name: str, first: str, sharing: Doomed, texts: Texts) -> None:
    Doom(GOT, PeerGone).foretell(sharing.complete().directory.name, name)
    asked = asyncio.create_task(all_is_well(sharing, texts))
    await asyncio.to_thread(sharing.until, lambda: sharing.num_active() > 0 or asked.done())
    await asyncio.to_thread(sharing.kill, first)
    await asked
    await asyncio.to_thread(sharing.ended, name)
    await asyncio.to_thread(sharing.complete)


@pytest.mark.parametrize(
    ("moment", "kind"), [(AFTER, WeightsWanted), (AFTER, WeightsProgress), (BEFORE, WeightsFilled)]
)
async def test_while_it_fills_weights_for_all(
    moment: Moment, kind: type[Message], checkpoint: Checkpoint, texts: Texts
) -> None:
    with Doomed(checkpoint("qwen3-tied")[0], *FLAGS) as system:
        system.start_memory()
        Doom(moment, kind).foretell(system.directory.name, "decode-0")
        system.start_worker("decode-0")
        system.until(lambda: "fills" in system.log("memory"), START_TIMEOUT_S)
        system.start_router(0, *ROUTER_FLAGS)
        for name in ("prefill-0", "decode-1"):
            system.start_worker(name)
        await asyncio.to_thread(system.ended, "decode-0")
        await all_is_well(system.complete(), texts)
        assert system.log("memory").count("fills") == 2, "another went on with it, and once it was there nobody did"


HANGS = [
    ("prefill-0", BEFORE, KVOffer),
    ("prefill-0", BEFORE, TokenBatch),
    ("decode-0", GOT, DecodeRequest),
    ("decode-0", GOT, KVOffer),
    ("decode-0", AFTER, KVAccepted),
    ("decode-0", AFTER, TokenBatch),
]


@pytest.fixture(scope="module")
def impatient(checkpoint: Checkpoint) -> Iterator[Doomed]:
    """A system that soon takes who is silent for dead, with room enough beside what that one has."""
    blocks = ("--kv-pool-bytes", str(5 * FEW_BLOCKS * BLOCK_BYTES))
    yield from systems(checkpoint, *blocks, silence_s=1.0)


@pytest.mark.parametrize(("name", "moment", "kind"), first_then(pytest.mark.slow, HANGS, is_row=True))
async def test_who_hangs_at_some_step_is_done_without_and_takes_part_again(
    name: str, moment: Moment, kind: type[Message], impatient: Doomed, texts: Texts
) -> None:
    directory = impatient.complete().directory.name
    Doom(moment, kind, 2, signal.SIGSTOP).foretell(directory, name)
    await all_is_well(impatient, texts)
    assert has_come_true(directory, name)
    impatient.processes[name].send_signal(signal.SIGCONT)
    await asyncio.to_thread(impatient.complete)
    await all_is_well(impatient, texts)


@pytest.mark.parametrize("others", [("memory",), ("memory", "router")], ids=["but the router", "and the router"])
async def test_all_die_at_once(others: tuple[str, ...], checkpoint: Checkpoint, texts: Texts) -> None:
    with Doomed(checkpoint("qwen3-tied")[0], *FLAGS) as system:
        system.start_memory()
        asked = asyncio.create_task(all_is_well(system.complete(), texts))
        await asyncio.to_thread(system.until, lambda: system.num_active() > 0 or asked.done())
        for process in [system.processes[name] for name in (*WORKERS, *others)]:
            process.kill()
        for name in (*WORKERS, *others):
            system.processes.pop(name).wait(TIMEOUT_S)
        if "router" in others:
            with pytest.raises(aiohttp.ClientError):
                await asked
        system.start_memory()
        await asyncio.to_thread(system.complete)
        await (all_is_well(system, texts) if asked.done() else asked)
        await asyncio.to_thread(system.complete)


async def test_what_is_offered_stays_with_its_prefill_worker_while_their_memory_server_stands_still(
    sharing: Doomed, checkpoint: Checkpoint
) -> None:
    """The router asks again and again, and replays nothing."""
    directory, model = checkpoint("qwen3-tied")
    asked = prompts(4, 5, 15, seed=6)
    server, place = sharing.complete().processes["memory"], sharing.directory.name
    num_replays = sharing.log("router").count("replayed")
    server.send_signal(signal.SIGSTOP)
    Doom(AFTER, KVOffer, ends_by=signal.SIGCONT).foretell(place, "prefill-0")
    task = asyncio.create_task(complete_all(sharing.url, asked, max_tokens=8, ignore_eos=True))
    await asyncio.to_thread(sharing.until, lambda: has_come_true(place, "prefill-0"))
    for name in ("prefill-0", "decode-0"):  # the decode worker has nothing of which it could be asked
        Doom(AFTER, InquiryReply, 5, signal.SIGCONT).foretell(place, name)
    await asyncio.to_thread(sharing.until, lambda: has_come_true(place, "prefill-0"))
    assert not has_come_true(place, "decode-0") and not task.done()
    server.send_signal(signal.SIGCONT)
    answers = await task
    assert [answer.error for answer in answers] == [None] * len(asked)
    reference = Reference(directory, model)
    assert [answer.text for answer in answers] == [reference.text(p, 8, ignore_eos=True) for p in asked]
    assert sharing.log("router").count("replayed") == num_replays


@pytest.mark.slow
async def test_without_a_memory_server_that_hangs_workers_finish_and_serve_with_the_next(
    sharing: Doomed, texts: Texts
) -> None:
    """Whoever hangs for long ends itself (`common.memory.server.server.Watchdog`); a test has no time for that."""
    server = sharing.complete().processes.pop("memory")
    server.send_signal(signal.SIGSTOP)
    asked = asyncio.create_task(all_is_well(sharing, texts))
    for name in WORKERS:
        assert await asyncio.to_thread(sharing.processes.pop(name).wait, TIMEOUT_S) == 0
        assert "memory.sock: not a word for" in sharing.log(name)
    server.kill()
    server.wait(TIMEOUT_S)
    sharing.start_memory()
    await asyncio.to_thread(sharing.complete)
    await asked
    await asyncio.to_thread(sharing.complete)
