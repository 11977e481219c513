"""TOML and flags over it; a mistake is named with what would have been right."""

from dataclasses import fields
from pathlib import Path

import pytest

from common.config import DECODE_SECTIONS, PREFILL_SECTIONS, ROUTER_SECTIONS, Config
from common.errors import ConfigError
from common.options import from_tables, parse, to_flags


def parsed(*argv: str) -> Config:
    return parse(Config, [f.name for f in fields(Config)], "test", "", argv)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "baton.toml"
    path.write_text('[router]\nport = 9000\nhost = "::1"\n[kv]\nblock_size = 32\n')
    config = parsed("--config", str(path), "--router-port", "9001", "--worker-cuda-graphs", "false")
    assert (config.router.port, config.router.host, config.kv.block_size) == (9001, "::1", 32)
    assert config.worker.cuda_graphs is False
    assert config.prefill == Config().prefill


def test_flags_reproduce_a_config() -> None:
    config = parsed(
        "--router-port", "9", "--kv-memory-fraction", "0.5", "--worker-batching", "false", "--model-name", "m"
    )
    assert parsed(*to_flags(config, [f.name for f in fields(Config)])) == config


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"rooter": {}}, r"unknown section: rooter; known: .*router"),
        ({"router": {"prot": 1}}, r"unknown key in \[router\]: prot; known: .*port"),
        ({"router": {"port": "x"}}, r"router\.port = 'x': wants int, got str"),
        ({"router": {"port": True}}, r"router\.port = True: wants int, got bool"),
        ({"router": {"port": 70000}}, r"router\.port = 70000: 0 to 65535"),
        ({"kv": {"transport": "pigeon"}}, r"kv\.transport = 'pigeon': one of auto, cuda_ipc, shm, none"),
        ({"kv": {"memory_fraction": 2}}, r"kv\.memory_fraction = 2\.0: above 0, at most 0\.98"),
        ({"net": {"worker_timeout_s": 0.1}}, r"at least two heartbeats"),
    ],
)
def test_mistakes_are_named(tables: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_tables(Config, tables)


@pytest.mark.parametrize("text", ["port = 1", "[router", "router = 5"])
def test_a_broken_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "baton.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"baton\.toml"):
        parsed("--config", str(path))
    with pytest.raises(ConfigError, match="nowhere"):
        parsed("--config", "nowhere.toml")


@pytest.mark.parametrize("sections", [ROUTER_SECTIONS, PREFILL_SECTIONS, DECODE_SECTIONS])
def test_help_explains_every_flag(sections: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse(Config, sections, "test", "", ["--help"])
    text = capsys.readouterr().out
    for section in sections:
        for option in fields(getattr(Config(), section)):
            assert f"--{section}-{option.name}".replace("_", "-") in text
            assert option.metadata["help"].split()[0] in text
