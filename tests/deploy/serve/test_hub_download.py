"""Downloads from a server that answers as the Hub does: what comes, and what is said of what does not."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest

from common.base.errors import ConfigError
from deploy.serve import hub_download
from deploy.serve.model_source import find_model
from tests.deploy.serve.hub import HUB_ID, Hub

FILES = {
    "config.json": b"{}", "model.safetensors": bytes(100_000), "tokenizer.json": b"[]", "README.md": b"of no use",
    "pytorch_model.bin": bytes(10), "original/model.safetensors": bytes(10),
}  # fmt: skip
WANTED = ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(FILES)
    constants = huggingface_hub.constants
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    monkeypatch.setattr(time, "sleep", lambda _s: None)
    yield server
    server.end()


@pytest.mark.medium
def test_what_is_needed_is_downloaded_once_and_found_when_nobody_answers(hub: Hub) -> None:
    path = find_model(HUB_ID)
    assert sorted(each.name for each in path.iterdir()) == sorted(hub.sent) == WANTED
    assert find_model(HUB_ID) == path
    assert sorted(hub.sent) == WANTED, "nothing comes twice"
    hub.is_silent = True
    assert find_model(HUB_ID) == path
    hub.end()
    assert find_model(HUB_ID) == path


@pytest.mark.medium
@pytest.mark.parametrize("how", ["silent", "gone"])
def test_who_does_not_answer_is_named_in_time(hub: Hub, how: str) -> None:
    if how == "silent":
        hub.is_silent = True
    else:
        hub.end()
    with pytest.raises(
        ConfigError, match=f"(?s)not all of it, and {hub.endpoint} .*(timed out|refused); check the net"
    ):
        find_model(HUB_ID)


@pytest.mark.parametrize(
    ("listing", "refusal", "said"),
    [
        (None, (401, "GatedRepo"), "is gated: accept its licence on the Hub, then run `hf auth login` or set HF_TOKEN"),
        (None, (403, "GatedRepo"), "is gated: accept its licence"),
        (None, (403, ""), "403.*; run `hf auth login` or set HF_TOKEN"),
        ((401, "RepoNotFound"), None, f"the Hub has no model '{HUB_ID}', or it is private: check the name, or run `hf"),
        ((401, ""), None, "401.*; run `hf auth login` or set HF_TOKEN"),
        ((429, ""), None, "does not give it: .*429.*try again later"),
        ((503, ""), None, "does not give it: .*503.*try again later"),
    ],
)
def test_a_refusal_is_said_in_one_line_with_what_to_do(
    hub: Hub, listing: tuple[int, str] | None, refusal: tuple[int, str] | None, said: str
) -> None:
    hub.listing, hub.refusal = listing, refusal
    with pytest.raises(ConfigError, match=f"^[^\n]*{said}[^\n]*$"):
        find_model(HUB_ID)


def test_a_download_that_broke_goes_on_with_what_is_missing(hub: Hub) -> None:
    hub.breaks.add("model.safetensors")
    with pytest.raises(
        ConfigError, match=f"^cannot download {HUB_ID}: [^\n]+; files that are complete stay there: start"
    ):
        find_model(HUB_ID)
    hub.listing = (503, "")
    with pytest.raises(ConfigError, match=f"or not all of it.*; and there is no directory '{HUB_ID}' here"):
        find_model(HUB_ID)
    hub.listing = None
    hub.breaks.clear()
    hub.sent.clear()
    assert sorted(each.name for each in find_model(HUB_ID).iterdir()) == WANTED
    assert hub.sent == ["model.safetensors"]


def test_a_model_for_which_there_is_no_room_is_not_begun(hub: Hub, tmp_path: Path) -> None:
    hub.claimed_bytes = 10**15
    with pytest.raises(ConfigError, match=rf"takes 3000000\.00 GB more, and {tmp_path} has [\d.]+ GB left: make room"):
        find_model(HUB_ID)
    assert not hub.sent


def test_a_disk_that_fills_up_meanwhile_is_named(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(huggingface_hub.HfApi, "snapshot_download", Mock(side_effect=full))
    with pytest.raises(ConfigError, match=rf"No space left on device; {tmp_path}/models--owner--tiny is full: make r"):
        find_model(HUB_ID)


def test_it_says_how_far_it_is(hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    hub.files = FILES | {"model.safetensors": bytes(20_000_000)}
    monkeypatch.setattr(hub_download, "PROGRESS_S", 0.0)
    find_model(HUB_ID)
    said, errors = capfd.readouterr()
    assert re.search(rf"(?m)^{HUB_ID}: 0\.0\d of 0\.02 GB are there after \d+ s$", said)
    assert not errors, "and no bars"


@pytest.mark.medium
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_gives_up_need_not_wait_for_it(hub: Hub, tmp_path: Path, number: signal.Signals) -> None:
    hub.files = FILES | {"model.safetensors": bytes(30_000_000)}
    hub.holds.add("model.safetensors")
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(tmp_path)}
    code = f"from deploy.serve.model_source import find_model; find_model({HUB_ID!r})"
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as process:
        assert hub.is_held.wait(60)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert not list(tmp_path.glob("*/blobs/*.incomplete"))


GGUF_FILES = {
    "README.md": b"of no use", "config.json": b"{}", "mmproj-F16.gguf": b"eyes", "Tiny-Q8_0.gguf": bytes(1000),
    "Q4_K_M/Tiny-Q4_K_M-00001-of-00002.gguf": b"first", "Q4_K_M/Tiny-Q4_K_M-00002-of-00002.gguf": b"second",
}  # fmt: skip


def test_a_gguf_file_comes_alone_and_all_its_parts(hub: Hub) -> None:
    hub.files = GGUF_FILES
    path = find_model(f"{HUB_ID}:q4_k_m")
    assert path.read_bytes() == b"first" and path.name == "Tiny-Q4_K_M-00001-of-00002.gguf"
    assert sorted(hub.sent) == [each for each in GGUF_FILES if each.startswith("Q4_K_M/")]
    assert find_model(f"{HUB_ID}/Q4_K_M/{path.name}") == find_model(f"{HUB_ID}:{path.name}") == path
    assert find_model(f"{HUB_ID}:Q8_0").stat().st_size == 1000
    assert len(hub.sent) == 3, "nothing comes twice"
    hub.is_silent = True
    assert find_model(f"{HUB_ID}:Q4_K_M") == path, "found when nobody answers"
    with pytest.raises(ConfigError, match=r"has no file 'Q6_K'; name one of owner/tiny:Q4_K_M/Tiny"):
        find_model(f"{HUB_ID}:Q6_K")


def test_a_repository_of_gguf_files_asks_for_one_of_them(hub: Hub) -> None:
    hub.files = GGUF_FILES
    wanted = (
        r"owner/tiny has its model in GGUF; name one of owner/tiny:Q4_K_M/Tiny-.*, owner/tiny:Tiny-Q8_0\.gguf, or by"
    )
    with pytest.raises(ConfigError, match=wanted):
        find_model(HUB_ID)
    assert not hub.sent


def test_a_gguf_file_that_cannot_come_is_refused_with_the_reason(hub: Hub, tmp_path: Path) -> None:
    hub.files = GGUF_FILES
    hub.claimed_bytes = 10**15
    with pytest.raises(ConfigError, match=r"takes 1000000\.00 GB more"):
        find_model(f"{HUB_ID}:Q8_0")
    hub.listing = (401, "RepoNotFound")
    with pytest.raises(ConfigError, match=f"the Hub has no model '{HUB_ID}', or it is private"):
        find_model(f"{HUB_ID}:Q8_0")
    hub.listing, hub.is_silent = None, True
    with pytest.raises(ConfigError, match=r"is not in the local cache, or not all of it, and .* does not give it"):
        find_model(f"{HUB_ID}:Q8_0")
    assert not hub.sent
