"""Requests that say much of each token of a large vocabulary cost the workers of all others nothing."""

import asyncio
import io
import json
import shutil
import signal
from pathlib import Path

import aiohttp
import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.system import TIMEOUT_S, System

pytestmark = pytest.mark.medium

DEMO, VOCAB = Path("deploy/demo_model"), 151_936  # as Qwen3 has
NUM_TEXTS = 128
HEADERS = {"Content-Type": "application/json"}
SHAPES = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128),
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One small layer, and many tokens."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / name, tmp_path / name)
    config = json.loads((DEMO / "config.json").read_text()) | {
        "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 128, "layer_types": ["full_attention"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(0)
    layer = {f"{name}.weight": torch.randn(shape, generator=random) * 0.02 for name, shape in SHAPES.items()}
    layer |= {f"{name}_layernorm.weight": torch.ones(64) for name in ("input", "post_attention")}
    layer |= {f"self_attn.{name}_norm.weight": torch.ones(32) for name in "qk"}
    tensors = {f"model.layers.0.{name}": tensor for name, tensor in layer.items()}
    tensors |= {"model.norm.weight": torch.ones(64)}
    tensors |= {"model.embed_tokens.weight": torch.randn((VOCAB, 64), generator=random) * 0.02}
    save_file(tensors, str(tmp_path / "model.safetensors"))
    return tmp_path


@pytest.mark.slow
async def test_allowed_tokens_of_many_texts_do_not_pass_through_a_memory_server(model: Path) -> None:
    """Which stands still until all are offered: 77 MB of parameters, more than a worker keeps for its server."""
    body = {
        "prompt": [5], "n": NUM_TEXTS, "max_tokens": 2, "ignore_eos": True, "temperature": 0, "stream": True,
        "allowed_token_ids": [*range(1, 150_000)],
    }  # fmt: skip
    data = io.BytesIO(json.dumps(body).encode())
    begun, ended = set[int](), set[int]()
    with System(model).start() as system:
        server = system.processes["memory"]
        server.send_signal(signal.SIGSTOP)
        async with (
            asyncio.timeout(TIMEOUT_S),
            aiohttp.ClientSession() as session,
            session.post(f"{system.url}/v1/completions", data=data, headers=HEADERS) as response,
        ):
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: {"):
                    [choice] = json.loads(line.removeprefix(b"data: "))["choices"]
                    begun.add(choice["index"])
                    if choice["finish_reason"]:
                        ended.add(choice["index"])
                    elif len(begun) == NUM_TEXTS:
                        assert not ended
                        server.send_signal(signal.SIGCONT)
        assert len(ended) == NUM_TEXTS
        assert "replayed" not in system.log("router")
