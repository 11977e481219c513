import json
import shutil
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from common.base.errors import ConfigError
from common.models.forms import Target
from common.models.held import read_model
from common.models.loader import model_bytes
from common.models.reading import read_config
from common.settings.config import Config, ModelSection
from deploy.planning.step_times.shape import read_shape
from deploy.processes.placement import Gpu, place_workers
from deploy.serve.command import held_bytes as held_bytes_on
from deploy.serve.demo import DEMO_MODEL
from deploy.serve.model_source import find_model, hub_name, served_name, weights_bytes
from tests.support.forms import on_cpu
from tests.support.gguf_files import every, write_gguf
from tests.support.packed_checkpoints import CASES, awq_128, pack_checkpoint


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert find_model(str(tmp_path)) == tmp_path
    assert weights_bytes(tmp_path, on_cpu("auto")) == 5


@pytest.mark.parametrize("case", ["fp8-blocks", "awq-128", "nvfp4-modelopt", "mxfp8-compressed"])
def test_a_quantized_checkpoint_takes_the_bytes_of_what_is_held(case: str, tmp_path: Path) -> None:
    """Some matrices stay in the checkpoint's form, others are made plain."""
    for name in ("packed", "plain"):
        shutil.copytree(DEMO_MODEL, tmp_path / name)
    pack_checkpoint(tmp_path / "packed", tmp_path / "plain", CASES[case]() if case in CASES else awq_128())
    config, path = read_model(tmp_path / "packed", on_cpu("packed")), tmp_path / "packed"
    assert bool(config.kept) == (case != "mxfp8-compressed")
    held_bytes = weights_bytes(path, on_cpu("packed"))
    assert held_bytes == pytest.approx(model_bytes(config, "bfloat16"), rel=0.01)
    assert read_shape(path, Target(None), quantization="packed").weight_bytes == held_bytes
    config_of = Config(model=ModelSection(path=str(path)))
    on_gpu, on_a_cpu = (held_bytes_on(config_of, place_workers(1, 1, gpus)) for gpus in ([Gpu(0, 0, (9, 0))], []))
    assert on_gpu == held_bytes == read_shape(path, Target((9, 0))).weight_bytes
    assert on_a_cpu == (held_bytes if case == "fp8-blocks" else weights_bytes(path, on_cpu("plain")))
    plain_bytes = weights_bytes(path, on_cpu("plain"))
    assert plain_bytes == pytest.approx(model_bytes(read_model(path, on_cpu("plain")), "bfloat16"), rel=0.01)
    assert held_bytes < 0.75 * plain_bytes or not config.kept


def test_a_quantized_checkpoint_without_its_files_takes_2_bytes_an_element(tmp_path: Path) -> None:
    demo = Path("deploy/demo_model")
    config = json.loads((demo / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    norms = 2 * 256 * 9 + 2 * 64 * 8
    assert weights_bytes(tmp_path, on_cpu("auto")) == pytest.approx(
        (demo / "model.safetensors").stat().st_size - norms, rel=0.01
    )


@pytest.mark.parametrize("kind", ["plain", "fp8", "gguf"])
def test_matrices_in_8_bits_are_counted_by_codes_and_scales_whatever_the_files_have(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", DEMO_MODEL, every(Type.Q8_0)) if kind == "gguf" else tmp_path
    if kind != "gguf":
        config = json.loads((DEMO_MODEL / "config.json").read_text())
        packed = {"quantization_config": {"quant_method": "fp8"}} if kind == "fp8" else {}
        (path / "config.json").write_text(json.dumps(config | packed))
        shutil.copy(DEMO_MODEL / "model.safetensors", path)
    plain_bytes, fp8_bytes = weights_bytes(path, on_cpu("plain")), weights_bytes(path, on_cpu("fp8"))
    assert fp8_bytes == pytest.approx(model_bytes(read_config(path, "fp8"), "bfloat16"), rel=0.01)
    assert fp8_bytes < 0.6 * plain_bytes
    added = weights_bytes(path, on_cpu("plain"), "int8") - plain_bytes
    assert added == pytest.approx(2048 * (256 + 4), rel=0.2), "codes and scales beside the table"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model's directory in a Hugging Face cache, with two snapshots, the first of them `main`."""
    path = tmp_path / "models--owner--name"
    for name in ("blobs", "refs", "snapshots/first", "snapshots/second"):
        (path / name).mkdir(parents=True)
    (path / "blobs" / "5d1f").write_text("{}")
    (path / "refs" / "main").write_text("first")
    for snapshot in path.glob("snapshots/*"):
        (snapshot / "config.json").symlink_to("../../blobs/5d1f")
    return path


def test_a_model_in_a_hugging_face_cache_is_taken_as_a_directory(repository: Path) -> None:
    first = repository / "snapshots" / "first"
    assert find_model(str(repository)) == find_model(str(first)) == first
    assert served_name(first) == served_name(repository) == "owner/name"
    (repository / "refs" / "main").write_text("gone")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        find_model(str(repository))
    (repository / "snapshots" / "second" / "config.json").unlink()
    (repository / "snapshots" / "second").rmdir()
    assert find_model(str(repository)) == first, "the only one"


def test_a_snapshot_without_what_its_names_stand_for_is_refused(repository: Path) -> None:
    (repository / "blobs" / "5d1f").unlink()
    with pytest.raises(ConfigError, match="models--OWNER--NAME, which has both"):
        find_model(str(repository / "snapshots" / "first"))


def test_a_directory_is_called_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Tiny-1B").mkdir()
    monkeypatch.chdir(tmp_path / "Tiny-1B")
    assert served_name(Path()) == served_name(Path("../Tiny-1B/")) == "Tiny-1B"


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        find_model(str(tmp_path))


def test_what_is_neither_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither a directory nor a Hub id"):
        find_model("/no/such/model")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Qwen/Qwen3-4B", True), ("./model", False), ("/a/b", False), ("model", False), ("a/b/c", False), ("../b", False)],
)
def test_hub_name(name: str, expected: bool) -> None:
    assert (hub_name(name) is not None) is expected
