"""Workers of a model whose matrices are held in several forms: what they share, and what they refuse each other."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.own_memory import own_memory
from common.base.errors import LayoutMismatch
from common.device.ahead.absent_engine import absent_engine
from common.device.engine.engine import Engine, build_engine
from common.device.engine.pool_budget import sized
from common.device.engine.served_model import served_model
from common.kv.transport import check_compatible
from common.memory.client.client import MemoryClient
from common.models.decoder import Decoder
from common.models.layers.attention import AttentionPart
from common.ops.base import Scheme, Weight
from common.settings.config import Config, KernelsSection, ModelSection, WorkerSection
from common.settings.memory_sections import KVSection
from common.wire.values.block_key import root_of
from deploy.serve.demo import DEMO_MODEL
from tests.support.messages import pool_export
from tests.support.packed_checkpoints import awq_128, pack_checkpoint

FORMS = {"auto": "plain", "plain": "plain", "packed": "packed", "fp8": "fp8"}
"""What a CPU holds, by choice."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of AWQ."""
    path = tmp_path_factory.mktemp("awq")
    for name in ("packed", "plain"):
        shutil.copytree(DEMO_MODEL, path / name)
    pack_checkpoint(path / "packed", path / "plain", awq_128())
    return path / "packed"


def config_of(directory: Path, choice: str) -> Config:
    return Config(
        model=ModelSection(path=str(directory), quantization=choice),
        worker=WorkerSection(device="cpu"),
        kv=KVSection(cpu_pool_bytes=4 << 20),
    )


@pytest.fixture(scope="module")
def engines(directory: Path) -> Iterator[dict[str, Engine]]:
    """A worker of each choice, all at one memory server."""
    with own_memory("cpu") as first:
        clients = [MemoryClient(first.path, choice, 1, is_decoding=True) for choice in FORMS]
        yield {
            choice: build_engine(config_of(directory, choice), client, step_tokens=64, logit_rows=4)
            for choice, client in zip(FORMS, clients, strict=True)
        }
        for client in clients:
            client.close()


def test_what_is_held_and_not_what_was_asked_for_says_who_shares_a_pool(engines: dict[str, Engine]) -> None:
    pools = {choice: engine.shared.pool_id for choice, engine in engines.items()}
    assert {choice: pools[form] for choice, form in FORMS.items()} == pools
    assert len(set(pools.values())) == len(set(FORMS.values()))


def qkv_of(model: Decoder) -> Weight:
    """A matrix of the first layer."""
    mixer, _ = model.layers[0]
    assert isinstance(mixer, AttentionPart)
    return mixer.qkv


def test_weights_in_two_forms_are_two_regions(engines: dict[str, Engine]) -> None:
    found = {}
    for choice, engine in engines.items():
        assert isinstance(engine.model, Decoder)
        found[choice] = qkv_of(engine.model).data.dtype
    assert found == {"auto": torch.float32, "plain": torch.float32, "packed": torch.uint8, "fp8": torch.float8_e4m3fn}


def test_blocks_and_prefixes_of_another_form_are_refused(engines: dict[str, Engine]) -> None:
    """Of one form they are taken, whatever was asked for."""
    for ours, mine in engines.items():
        for theirs, other in engines.items():
            export = pool_export("p", layout=other.pool.layout)
            if FORMS[ours] == FORMS[theirs]:
                check_compatible(export, mine.pool, "shm")
            else:
                with pytest.raises(LayoutMismatch, match="fingerprint"):
                    check_compatible(export, mine.pool, "shm")
            is_same = root_of(mine.pool.layout) == root_of(other.pool.layout)
            assert is_same == (FORMS[ours] == FORMS[theirs]), "the prefix of a text has the keys of a form"


def test_a_router_tells_choices_apart(engines: dict[str, Engine]) -> None:
    assert len({engine.model_fingerprint for engine in engines.values()}) == len(FORMS)


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> torch.device:
    properties = SimpleNamespace(
        name="a GPU", major=capability[0], minor=capability[1], multi_processor_count=100,
        shared_memory_per_block_optin=99 << 10, total_memory=80 * 10**9,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return torch.device("cuda", 0)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_a_worker_on_a_gpu_has_packed_matrices_and_one_on_a_cpu_plain_ones(
    capability: tuple[int, int], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no pool and no prefix in common, though both are asked for the same."""
    config, gpu = config_of(directory, "auto"), on_gpu(monkeypatch, capability)
    packed, plain = (served_model(config_of(directory, choice), torch.device("cpu")) for choice in ("packed", "plain"))
    found = served_model(config, gpu)
    assert found.kept == packed.kept and found.codes == packed.codes != plain.codes
    assert served_model(config, torch.device("cpu")).codes == plain.codes
    without = replace(config, kernels=KernelsSection(linear="torch"))
    in_fp32 = replace(config, model=replace(config.model, dtype="float32"))
    assert served_model(without, gpu).codes == served_model(in_fp32, gpu).codes == plain.codes


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_kernels_are_compiled_ahead_for_what_a_worker_holds_there(
    capability: tuple[int, int], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, gpu = config_of(directory, "auto"), on_gpu(monkeypatch, capability)
    engine = absent_engine(sized(config, gpu), step_tokens=64, logit_rows=4)
    assert isinstance(engine.model, Decoder)
    assert engine.model.config.codes == served_model(config, gpu).codes
    assert qkv_of(engine.model).scheme is Scheme.INT4
