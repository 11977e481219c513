from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from common.errors import ConfigError
from deploy.model_source import find_model, is_hub_id, weights_bytes


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert find_model(str(tmp_path)) == tmp_path
    assert weights_bytes(tmp_path) == 5


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
def test_is_hub_id(name: str, expected: bool) -> None:
    assert is_hub_id(name) is expected


def test_an_unreachable_hub_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_args: object, **_kwargs: object) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConfigError, match="cannot be reached"):
        find_model("owner/name")
