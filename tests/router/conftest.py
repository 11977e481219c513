"""A small byte-level model directory, a running router that fakes can dial, and a client."""

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers
import uvloop
from aiohttp import web

from common.settings.config import Config, ModelSection, NetSection, RouterSection
from common.wire.messages.worker import Knock
from common.wire.values.fingerprint import model_fingerprint, tokenizer_fingerprint
from common.wire.values.sampling_params import SamplingParams
from router.api.app import start_server
from router.api.http_request import SERVICE
from router.service import Service
from tests.support.fakes import FakeDecode, FakeModel, FakePrefill, FakeWorker, free_endpoint

EOS = 0
MAX_MODEL_LEN = 600
TEXT = "the quick brown fox jumps over the lazy dog; schöne Grüße aus Köln, 你好世界, привет, 🎉👨‍👩‍👧 "
NET = NetSection(heartbeat_s=0.1, worker_timeout_s=60.0)
"""Nobody is taken for dead because this process did not get to run; see `Cluster.age` for those who are to be."""

CHAT_TEMPLATE = """
{%- for message in messages -%}
    {%- if message.role == "tool" -%}{{- raise_exception("no tools here") -}}{%- endif -%}
    {{- message.role + ": " + message.content | trim + "\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "assistant:" + (" now" if be_quick is defined and be_quick else "") -}}{%- endif -%}
"""


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The router's own kind of event loop: transports of asyncio's behave differently at their ends."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokenizer.json (byte-level BPE, id 0 is the end of text), config.json, generation_config.json."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": MAX_MODEL_LEN, "eos_token_id": 5}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS]}))
    chat = {"chat_template": CHAT_TEMPLATE, "eos_token": {"content": "<|endoftext|>"}}
    (path / "tokenizer_config.json").write_text(json.dumps(chat))
    return path


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="session")
def model(model_dir: Path, tokenizer: tokenizers.Tokenizer) -> FakeModel:
    return FakeModel("tiny", model_fingerprint(model_dir), tokenizer_fingerprint(model_dir), tokenizer.get_vocab_size())


@dataclasses.dataclass
class Cluster:
    """A router on free ports, and the fakes that dial it."""

    url: str
    service: Service
    runner: web.AppRunner
    model: FakeModel
    workers: list[FakeWorker] = dataclasses.field(default_factory=list)

    @property
    def net(self) -> NetSection:
        return dataclasses.replace(self.service.config.net, router_endpoint=self.service.hub.endpoint)

    def prefill(self, worker_id: str = "prefill-0", **ready: Any) -> FakePrefill:
        worker = FakePrefill(self.net, self.model, worker_id, **ready)
        self._start(worker)
        return worker

    def decode(
        self,
        worker_id: str = "decode-0",
        step_s: float = 0.0,
        path_error: str = "",
        most_outputs: int = FakeDecode.most_outputs,
        **ready: Any,
    ) -> FakeDecode:
        worker = FakeDecode(self.net, self.model, worker_id, **ready)
        worker.step_s, worker.path_error, worker.most_outputs = step_s, path_error, most_outputs
        self._start(worker)
        return worker

    def _start(self, worker: FakeWorker) -> None:
        self.workers.append(worker)
        worker.start()

    def age(self, worker: FakeWorker, timeouts: float) -> bool:
        """As if nothing were heard of it for so many times what a worker may be silent; False once it is out."""
        member = self.service.pool.get(worker.worker_id, worker.epoch)
        if member is not None:
            member.last_seen_s = time.monotonic() - timeouts * NET.worker_timeout_s
        return member is not None

    def stop_clockwork(self) -> None:
        """The router knocks at no doors any more: what is to be found out something else has to."""
        assert self.service._clockwork is not None
        self.service._clockwork.cancel()

    async def until_cut_off(self, *dead: FakeWorker) -> None:
        """The sockets know that these are gone; nobody else is told."""
        sockets = self.service.hub._hub
        await self.until(
            lambda: not any(sockets.send(worker.connection, Knock(0)) for worker in dead), "the ends of connections"
        )

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for something that must come; the deadline is far beyond what it takes."""
        for _ in range(3000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"never: {what}")

    async def until_paths(self, num_paths: int) -> None:
        await self.until(lambda: len(list(self.service.pool.paths)) >= num_paths, f"{num_paths} KV paths")


StartCluster = Callable[..., Awaitable[Cluster]]


@pytest.fixture
async def start_cluster(
    model_dir: Path, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StartCluster]:
    """Start a router without workers, whose helpers have time; options of [router] as keywords."""
    monkeypatch.setattr("router.grammar.checks.DEADLINE_S", 100.0)
    monkeypatch.setattr("router.reading.reader.SHORT_DEADLINE_S", 100.0)
    clusters: list[Cluster] = []

    async def start(endpoint: str = "", **router: Any) -> Cluster:
        config = Config(
            model=ModelSection(path=str(model_dir)),
            net=dataclasses.replace(NET, router_endpoint=endpoint or free_endpoint()),
            router=RouterSection(**{"port": 0} | router),
        )
        runner, url = await start_server(config)
        service = runner.app[SERVICE]
        assert isinstance(service, Service)
        cluster = Cluster(url, service, runner, model)
        clusters.append(cluster)
        return cluster

    yield start
    for cluster in clusters:
        for worker in cluster.workers:
            await asyncio.to_thread(worker.kill)
        await cluster.runner.cleanup()


@pytest.fixture
async def cluster(start_cluster: StartCluster) -> Cluster:
    """A router with one prefill and one decode worker whose KV path is proven."""
    cluster = await start_cluster()
    cluster.prefill()
    cluster.decode()
    await cluster.until_paths(1)
    return cluster


class Client:
    """The openai client of one cluster, and what the fakes' model would say."""

    def __init__(self, cluster: Cluster, tokenizer: tokenizers.Tokenizer) -> None:
        self.openai = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=100.0)
        self.completions = self.openai.completions
        self.model: FakeModel = cluster.model
        self.tokenizer = tokenizer

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def visible_prompt(self) -> list[int]:
        """A prompt whose first greedy output token is a whole character: the first chunk needs no second token."""
        greedy = SamplingParams(temperature=0.0)
        ids = range(1, self.model.vocab_size)
        visible = (i for i in ids if self.tokenizer.decode([self.model.next_token(i, greedy)]).isalpha())
        return [next(visible)]

    def outputs(self, prompt: str | list[int], **sampling: Any) -> list[int]:
        """Token ids of an undisturbed run."""
        fields: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": (EOS,)} | sampling
        params = SamplingParams(**fields)
        return self.model.continuation(self.ids(prompt) if isinstance(prompt, str) else prompt, params)

    def expected(self, prompt: str | list[int], **sampling: Any) -> str:
        text: str = self.tokenizer.decode(self.outputs(prompt, **sampling), skip_special_tokens=True)
        return text

    async def streamed(self, **fields: Any) -> tuple[dict[int, str], dict[int, str], list[Any]]:
        """(text by choice, finish reason by choice, chunks)."""
        texts: dict[int, str] = {}
        reasons: dict[int, str] = {}
        chunks = []
        async for chunk in await self.completions.create(model="tiny", stream=True, **fields):
            chunks.append(chunk)
            for choice in chunk.choices:
                assert choice.index not in reasons
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
        return texts, reasons, chunks


@pytest.fixture
async def client(cluster: Cluster, tokenizer: tokenizers.Tokenizer) -> AsyncIterator[Client]:
    client = Client(cluster, tokenizer)
    yield client
    await client.openai.close()
