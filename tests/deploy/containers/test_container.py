import os
from pathlib import Path

import pytest

from common.base.errors import ConfigError
from common.wire.transport.secret import read_secret
from deploy.containers import container
from deploy.containers.container import command_of, downloaded, found, main


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    monkeypatch.setattr(container, "MOUNT", path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return path


def test_a_directory_is_served_under_its_name_outside(mount: Path) -> None:
    (mount / "config.json").write_text("{}")
    program, worker_id, *model = command_of("prefill_worker", "/models/Tiny-1B", ["--model-dtype", "float32"])
    assert (program, worker_id[:20]) == ("prefill_worker", "--worker-id=prefill-")
    assert model == ["--model-path", str(mount), "--model-name", "Tiny-1B", "--model-dtype", "float32"]
    assert command_of("router", "./x", [])[0:2] == ["router", "--model-path"], "a router has no such name"


def test_a_hub_id_is_found_in_the_cache_without_a_way_to_the_hub(mount: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the service `model` downloads it"):
        found("owner/name")
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / "5d1f"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert found("owner/name") == snapshot
    assert command_of("router", "owner/name", []) == [
        "router", "--model-path", str(snapshot), "--model-name", "owner/name"
    ]  # fmt: skip


def test_a_gguf_file_is_found_in_the_cache_or_the_directory(mount: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / "5d1f"
    snapshot.mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds no GGUF file; the service `model` downloads it"):
        found("owner/name:Q8_0")
    (snapshot / "Tiny-Q8_0.gguf").touch()
    assert found("owner/name:Q8_0") == snapshot / "Tiny-Q8_0.gguf"
    assert command_of("router", "owner/name:q8_0", [])[-1] == "owner/name:q8_0"
    (mount / "Tiny.gguf").touch()
    assert command_of("router", "/models/Tiny-1B", []) == [
        "router", "--model-path", str(mount / "Tiny.gguf"), "--model-name", "Tiny-1B"
    ]  # fmt: skip


def test_one_service_downloads_it(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "find_model", lambda name: Path("/models") / name)
    assert downloaded("owner/name") == Path("/models/owner/name")


@pytest.mark.parametrize("model", ["models/of/mine", "/no/such", "./model"])
def test_a_directory_that_is_not_there_is_said_so(mount: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", model]) == 2
    assert "a relative path begins at the directory of compose.yaml" in capsys.readouterr().err


def test_the_secret_is_made_once_and_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "baton"
    assert main(["secret", str(path)]) == 0
    made = read_secret(str(path))
    assert made and len(made) == 64
    assert main(["secret", str(path)]) == 0
    assert read_secret(str(path)) == made
    assert os.listdir(tmp_path) == ["baton"]
