"""TOML and flags over it; a mistake is named with what would have been right."""

import math
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from common.base.errors import ConfigError
from common.settings.config import ROUTER_SECTIONS, WORKER_SECTIONS, Config
from common.settings.options import from_tables, parse, to_flags
from common.settings.sources import MAX_FILE_BYTES

SECTIONS = [section.name for section in fields(Config)]
NUMBERS: list[tuple[str, type[Any], tuple[float, float] | None]] = [
    (f"{section}.{option.name}", type(option.default), option.metadata["within"])
    for section in SECTIONS
    for option in fields(getattr(Config(), section))
    if type(option.default) in (int, float) and not option.metadata["choices"]
]


def parsed(*argv: str) -> Config:
    return parse(Config, SECTIONS, "test", "", argv)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "baton.toml"
    path.write_text('[router]\nport = 9000\nhost = "::1"\n[kv]\nblock_size = 32\n')
    config = parsed("--config", str(path), "--router-port", "9001", "--worker-cuda-graphs", "false")
    assert (config.router.port, config.router.host, config.kv.block_size) == (9001, "::1", 32)
    assert config.worker.cuda_graphs is False
    assert config.prefill == Config().prefill


def test_variables_win_over_the_file_and_flags_over_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "baton.toml"
    path.write_text('[router]\nport = 9000\nhost = "::1"\n[kv]\nblock_size = 32\n')
    for name, text in (("ROUTER__PORT", "9001"), ("KV__BLOCK_SIZE", "64"), ("WORKER__CUDA_GRAPHS", "false")):
        monkeypatch.setenv(f"BATON_{name}", text)
    config = parsed("--config", str(path), "--router-port", "9002")
    assert (config.router.port, config.router.host, config.kv.block_size) == (9002, "::1", 64)
    assert config.worker.cuda_graphs is False


def test_what_others_put_into_the_environment_is_left_alone_and_a_slip_of_ours_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BATON_ROUTER_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("BATON_MODEL", "/models/m")
    assert parsed() == Config()
    monkeypatch.setenv("BATON_KV__BLOKSIZE", "32")
    with pytest.raises(ConfigError, match=r"BATON_KV__BLOKSIZE .* did you mean BATON_KV__BLOCK_SIZE\?"):
        parsed()


def test_all_that_is_wrong_is_said_at_once_with_where_it_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "baton.toml"
    path.write_text('[kv]\nblock_size = 7\n[log]\nlevle = "INFO"\n')
    monkeypatch.setenv("BATON_WORKER__BATCHING", "yes")
    monkeypatch.setenv("BATON_KV__BLOKSIZE", "32")
    monkeypatch.setenv("BATON_x__y", "1")
    with pytest.raises(ConfigError) as raised:
        parsed("--config", str(path), "--router-port", "x", "--net-worker-timeout-s", "0.1")
    lines = str(raised.value).splitlines()
    assert lines[0] == "7 settings are wrong:" and len(lines) == 8
    for part in (
        "router.port = 'x': wants int",
        "net.worker_timeout_s = 0.1: at least two heartbeats",
        "worker.batching = 'yes': wants bool, got str [BATON_WORKER__BATCHING]",
        f"kv.block_size = 7: one of 16, 32, 64 [{path}]",
        "unknown key in [log]: levle",
        "BATON_KV__BLOKSIZE is set in the environment, and no option; did you mean BATON_KV__BLOCK_SIZE?",
        "BATON_x__y is set in the environment, and no option",
    ):
        assert any(part in line for line in lines), part


def test_a_printed_config_is_one_and_says_where_each_value_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "baton.toml"
    path.write_text('[model]\nname = "a \\"b\\""\n')
    monkeypatch.setenv("BATON_KV__BLOCK_SIZE", "64")
    asked = ("--config", str(path), "--worker-batching", "false", "--net-heartbeat-s", "0.25")
    with pytest.raises(SystemExit, match="0"):
        parsed(*asked, "--print-config")
    printed = capsys.readouterr().out
    for line in (
        f'name = "a \\"b\\""  # {path}',
        "block_size = 64  # BATON_KV__BLOCK_SIZE",
        "batching = false  # --worker-batching",
        "memory_fraction = 0.85  # default",
    ):
        assert line in printed.splitlines()
    expected = parsed(*asked)
    monkeypatch.delenv("BATON_KV__BLOCK_SIZE")
    path.write_text(printed)
    assert parsed("--config", str(path)) == expected


def test_children_are_told_what_their_environment_would_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_KV__BLOCK_SIZE", "64")
    config = parsed("--kv-block-size", "16")
    assert parsed(*to_flags(config, SECTIONS)) == config == Config()


def test_flags_reproduce_a_config() -> None:
    config = parsed(
        "--router-port", "9", "--kv-memory-fraction", "0.5", "--worker-batching", "false", "--model-name", "m"
    )
    assert parsed(*to_flags(config, SECTIONS)) == config


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"rooter": {}}, r"unknown section: rooter; known: .*router"),
        ({"router": {"prot": 1}}, r"unknown key in \[router\]: prot; known: .*port"),
        ({"router": {"port": "x"}}, r"router\.port = 'x': wants int, got str"),
        ({"router": {"port": True}}, r"router\.port = True: wants int, got bool"),
        ({"router": {"port": 70000}}, r"router\.port = 70000: 0 to 65535"),
        ({"kv": {"transport": "pigeon"}}, r"kv\.transport = 'pigeon': one of auto, cuda_ipc, shm, nixl, none"),
        ({"kv": {"memory_fraction": 2}}, r"kv\.memory_fraction = 2\.0: 0\.01 to 0\.98; .* leave it out for 0\.85"),
        ({"net": {"worker_timeout_s": 0.1}}, r"net\.worker_timeout_s = 0\.1: at least two heartbeats"),
        ({"router": {"max_bodies_bytes": 4096}}, r"router\.max_bodies_bytes = 4096: at least router\.max_body_bytes"),
        ({"net": {"router_endpoint": "udp://x"}}, r"net\.router_endpoint = 'udp://x': auto, ipc://PATH or tcp"),
        ({"prefill": {"max_batch_tokens": 15}}, r"prefill\.max_batch_tokens = 15: at least 16, or 0 for what suits"),
        ({"worker": {"id": "two words"}}, r"worker\.id = 'two words': at most 100 ASCII characters"),
        ({"model": {"name": "m" * 201}}, r"model\.name = 'm+: at most 200 characters"),
    ],
)
def test_mistakes_are_named(tables: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_tables(Config, tables)


@pytest.mark.parametrize(("name", "kind", "within"), NUMBERS)
def test_every_number_has_its_range(name: str, kind: type[Any], within: tuple[float, float] | None) -> None:
    assert within is not None, f"{name} needs `within`, the least and the most that it may be"
    least, most = map(kind, within)
    section, key = name.split(".")
    assert least <= getattr(getattr(Config(), section), key) <= most
    no_numbers = [math.nan, math.inf, -math.inf] if kind is float else []
    for value in [least - 1, most + 1, kind(1 << 70), *no_numbers]:
        named = re.escape(f"{name} = {value!r}: {least:{'g' if kind is float else ''}} to ") + ".*; choose one of these"
        with pytest.raises(ConfigError, match=named):
            from_tables(Config, {section: {key: value}})
        with pytest.raises(ConfigError, match=named):
            parsed(f"--{section}-{key}={value}".replace("_", "-"))


def test_a_prompt_step_is_as_large_as_asked_for_or_as_suits_the_device() -> None:
    section = parsed("--prefill-max-num-seqs", "7").prefill
    assert [section.on(device).max_batch_tokens for device in ("cpu", "cuda")] == [1024, 8192]
    assert section.on("cpu").max_num_seqs == 7
    assert parsed("--prefill-max-batch-tokens", "4096").prefill.on("cpu").max_batch_tokens == 4096


def test_no_text_has_control_characters() -> None:
    for section in SECTIONS:
        for option in fields(getattr(Config(), section)):
            if isinstance(option.default, str):
                for value in ("a\0b", "two\nlines", "\udcff"):
                    with pytest.raises(ConfigError, match=rf"^{section}\.{option.name} = "):
                        from_tables(Config, {section: {option.name: value}})


def test_a_whole_number_beyond_all_others_is_in_no_range() -> None:
    with pytest.raises(ConfigError, match=r"^router\.header_timeout_s = inf: "):
        from_tables(Config, {"router": {"header_timeout_s": 10**400}})


@pytest.mark.parametrize("end", [0, 1], ids=["least", "most"])
def test_the_ends_of_all_ranges_are_taken(end: int) -> None:
    tables: dict[str, dict[str, object]] = {}
    for name, kind, within in NUMBERS:
        section, key = name.split(".")
        tables.setdefault(section, {})[key] = kind((within or ())[end])
    config = from_tables(Config, tables)
    assert parsed(*to_flags(config, SECTIONS)) == config


DIGITS, NESTS = "1" * 5_000, "[" * 100_000


@pytest.mark.parametrize(
    "text",
    ["port = 1", "[router", "router = 5", f"[router]\nport = {DIGITS}", f"a = {NESTS}", "#" * (MAX_FILE_BYTES + 1)],
)
def test_a_broken_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "baton.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"baton\.toml"):
        parsed("--config", str(path))
    with pytest.raises(ConfigError, match="nowhere"):
        parsed("--config", "nowhere.toml")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe: it is a named pipe"):
        parsed("--config", str(tmp_path / "pipe"))


@pytest.mark.parametrize("sections", [ROUTER_SECTIONS, WORKER_SECTIONS])
def test_help_explains_every_flag(sections: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse(Config, sections, "test", "", ["--help"])
    text = capsys.readouterr().out
    for section in sections:
        for option in fields(getattr(Config(), section)):
            assert f"--{section}-{option.name}".replace("_", "-") in text
            assert option.metadata["help"].split()[0] in text
    assert "0.01 to 60, default:" in " ".join(text.split())
