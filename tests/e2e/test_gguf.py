"""A GGUF file alone, of the demo model, is served with the texts of a single process of the same weights."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from common.models.held import read_model
from deploy.processes.launch_plan import SOURCE_ROOT
from tests.e2e.client import Completion, Reference, complete
from tests.e2e.programs import ROOT
from tests.e2e.system import System
from tests.support.forms import on_cpu
from tests.support.gguf_files import every, tensors_of, unpacked, write_gguf
from tests.support.ports import ReservedPort
from tests.support.stand_ins import DEADLINE_S

pytestmark = pytest.mark.medium

DEMO = ROOT / "deploy" / "demo_model"
TEXTS = ("ROMEO:\nBut soft", "The king is dead", "JULIET:\n", "First Citizen:\nBefore we proceed", "naïve 🙂 日本語")
MAX_TOKENS = 40


def reference(kind: Type) -> Reference:
    """A single process, whose matrices are rounded as a file in a type has them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO).float().eval()
    rounded = {name: unpacked(each, every(kind)(name)) for name, each in tensors_of(DEMO).items()}
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            for part, name in (
                (layer.self_attn.q_proj, "attn_q"), (layer.self_attn.k_proj, "attn_k"),
                (layer.self_attn.v_proj, "attn_v"), (layer.self_attn.o_proj, "attn_output"),
                (layer.mlp.gate_proj, "ffn_gate"), (layer.mlp.up_proj, "ffn_up"), (layer.mlp.down_proj, "ffn_down"),
            ):  # fmt: skip
                part.weight.copy_(rounded[f"blk.{number}.{name}.weight"])
        model.model.embed_tokens.weight.copy_(rounded["token_embd.weight"])
    return Reference(DEMO, model)


def expected_texts(kind: Type) -> list[str]:
    law = reference(kind)
    return [law.text(law.tokenizer.encode(text).ids, MAX_TOKENS) for text in TEXTS]


async def completed(url: str) -> list[str]:
    async with aiohttp.ClientSession() as session:
        found = [Completion() for _ in TEXTS]
        asked = zip(TEXTS, found, strict=True)
        await asyncio.gather(*(complete(session, url, text, into, max_tokens=MAX_TOKENS) for text, into in asked))
    assert [each.error for each in found] == [None] * len(TEXTS)
    return [each.text for each in found]


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16], ids=lambda kind: str(kind.name))
async def test_plain_types_give_the_directory_s_texts(kind: Type, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "demo.gguf", DEMO, every(kind))
    with System(path).start() as system:
        assert await completed(system.url) == expected_texts(Type.F32)
        system.until(system.all_blocks_free)


@contextmanager
def served(model: Path) -> Iterator[str]:
    """`baton serve` of a file, until it is left; yields the URL."""
    with ReservedPort() as port:
        command = [sys.executable, "-m", "deploy.cli", "serve", str(model), "--model-quantization", "packed",
                   "--device", "cpu", "--port", str(port.number), "--kv-cpu-pool-bytes", str(16 << 20)]  # fmt: skip
        with subprocess.Popen(command, cwd=SOURCE_ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as serve:
            try:
                yield f"http://127.0.0.1:{port.number}"
                serve.terminate()
                assert serve.wait(DEADLINE_S) == 0
            finally:
                serve.kill()


async def answer(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    async with (
        aiohttp.ClientSession() as session,
        session.request("POST" if body else "GET", url + path, json=body) as response,
    ):
        return await response.json() if response.status == 200 else None


async def is_ready(url: str) -> bool:
    try:
        health = await answer(url, "/health")
    except aiohttp.ClientError:
        return False
    return health is not None and health["status"] == "ok"


async def test_baton_serve_takes_a_quantized_file_in_parts(tmp_path: Path) -> None:
    """Its chat template and its tokens in a grammar are those of the file, too; the Hub's cache has links to blobs."""
    first = write_gguf(tmp_path / "demo-Q8_0.gguf", DEMO, every(Type.Q8_0), split_tensors=20)
    for number, part in enumerate([*tmp_path.glob("*.gguf")]):
        part.symlink_to(part.rename(tmp_path / f"blob{number}"))
    assert first.name == "demo-Q8_0-00001-of-00003.gguf"
    assert len(read_model(first, on_cpu("packed")).kept) == 4 * 4 + 1, "all products and the head stay packed"
    with served(first) as url:
        async with asyncio.timeout(DEADLINE_S):
            while not await is_ready(url):
                await asyncio.sleep(0.1)
        models = await answer(url, "/v1/models")
        assert [model["id"] for model in models["data"]] == ["demo-Q8_0"]
        texts = await completed(url)
        assert texts == expected_texts(Type.Q8_0)
        assert texts != expected_texts(Type.F32), "or the test would not notice other weights"
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["Here, and there!"]}}}
        messages = [{"role": "user", "content": "Where art thou?"}]
        chat = await answer(url, "/v1/chat/completions", {"messages": messages, "response_format": form})
        assert json.loads(chat["choices"][0]["message"]["content"]) == "Here, and there!"
