"""A GGUF file is found by its name, in parts or not, and what is not clear is refused with the names there are."""

from pathlib import Path

import pytest

from common.base.errors import ConfigError
from common.checkpoint.files import require_model
from deploy.serve.gguf_choice import chosen, models_among, parts_named
from deploy.serve.model_source import HubName, find_model, hub_name, served_name

NAMES = [
    "README.md", "config.json", "mmproj-F16.gguf", "Tiny-Q8_0.gguf", "Tiny-Q4_K_M.gguf", "Tiny-UD-Q4_K_XL.gguf",
    "BF16/Tiny-BF16-00001-of-00002.gguf", "BF16/Tiny-BF16-00002-of-00002.gguf", "other.Q4_0.gguf", "TINY-Q5_0.GGUF",
]  # fmt: skip


def test_models_are_first_parts_and_no_mmproj() -> None:
    assert models_among(NAMES) == sorted(
        ["Tiny-Q8_0.gguf", "Tiny-Q4_K_M.gguf", "Tiny-UD-Q4_K_XL.gguf", "BF16/Tiny-BF16-00001-of-00002.gguf",
         "other.Q4_0.gguf", "TINY-Q5_0.GGUF"]
    )  # fmt: skip
    assert parts_named("BF16/Tiny-BF16-00001-of-00002.gguf") == NAMES[6:8]
    assert parts_named("Tiny-Q8_0.gguf") == ["Tiny-Q8_0.gguf"]


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("Q8_0", "Tiny-Q8_0.gguf"),
        ("q4_k_m", "Tiny-Q4_K_M.gguf"),
        ("Q4_K_XL", "Tiny-UD-Q4_K_XL.gguf"),
        ("UD-Q4_K_XL", "Tiny-UD-Q4_K_XL.gguf"),
        ("Q4_0", "other.Q4_0.gguf"),
        ("BF16", "BF16/Tiny-BF16-00001-of-00002.gguf"),
        ("Tiny-Q8_0.gguf", "Tiny-Q8_0.gguf"),
        ("BF16/Tiny-BF16-00002-of-00002.gguf", "BF16/Tiny-BF16-00001-of-00002.gguf"),
        ("Tiny-BF16-00001-of-00002.gguf", "BF16/Tiny-BF16-00001-of-00002.gguf"),
        ("q5_0", "TINY-Q5_0.GGUF"),
    ],
)
def test_a_file_is_meant_by_its_name_or_the_end_of_it(wanted: str, name: str) -> None:
    assert chosen(NAMES, wanted, "o/n") == name


@pytest.mark.parametrize(
    ("names", "wanted", "message"),
    [
        (NAMES, "Q6_K", r"o/n has no file 'Q6_K'; name one of o/n:BF16/Tiny-BF16-00001-of-00002\.gguf, .*o/n:Q4_K_M"),
        (NAMES, "K_M", r"no file 'K_M'"),
        (NAMES, "mmproj-F16.gguf", r"no file 'mmproj-F16\.gguf'"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", r"several files 'Q4_0'; name one of o/n:a-Q4_0\.gguf, o/n:b-Q4_0"),
        (["a.safetensors"], "Q4_0", r"o/n has no model in GGUF; leave 'Q4_0' out"),
        ([f"{i}.gguf" for i in range(20)], "x", r"o/n:15\.gguf and 12 more"),
    ],
)
def test_what_is_not_clear_is_refused(names: list[str], wanted: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(names, wanted, "o/n")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen3-4B", HubName("Qwen/Qwen3-4B")),
        ("o/n:Q4_K_M", HubName("o/n", "Q4_K_M")),
        ("o/n:Tiny-Q8_0.gguf", HubName("o/n", "Tiny-Q8_0.gguf")),
        ("o/n:BF16/a.gguf", HubName("o/n", "BF16/a.gguf")),
        ("o/n/a.gguf", HubName("o/n", "a.gguf")),
        ("o/n/BF16/a.gguf", HubName("o/n", "BF16/a.gguf")),
        ("models/a.gguf", None),
        ("a.gguf", None),
        ("/o/n/a.gguf", None),
        ("./o/n/a.gguf", None),
        ("o/n/a.bin", None),
    ],
)
def test_names_of_the_hub(name: str, expected: HubName | None) -> None:
    assert hub_name(name) == expected


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("mmproj-F16.gguf", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf"):
        (tmp_path / name).touch()
    return tmp_path


def test_a_file_or_a_directory_with_one_model_is_taken(directory: Path) -> None:
    first = directory / "a-00001-of-00002.gguf"
    assert find_model(str(directory)) == find_model(str(first)) == first
    assert find_model(str(directory / "a-00002-of-00002.gguf")) == first
    (directory / "config.json").write_text("{}")
    assert find_model(str(directory)) == first, "repositories of GGUF files may have a config.json"
    (directory / "model.safetensors").touch()
    assert find_model(str(directory)) == directory
    assert served_name(first) == "a" and served_name(first, "o/n:Q4_0") == "o/n:Q4_0"
    assert served_name(directory, str(directory)) == directory.name


def test_a_directory_named_like_a_file_is_no_model_of_another_directory(directory: Path) -> None:
    (directory / "inner.gguf").mkdir()
    assert find_model(str(directory)) == directory / "a-00001-of-00002.gguf"


def test_a_file_of_another_name_is_told_how_to_be_named(directory: Path) -> None:
    (directory / "sha256-0").touch()
    with pytest.raises(
        ConfigError, match=r"sha256-0 is no model: the name of a GGUF file ends in \.gguf; rename or link it"
    ):
        find_model(str(directory / "sha256-0"))


def test_several_models_or_missing_parts_are_refused(directory: Path) -> None:
    (directory / "a-00002-of-00002.gguf").unlink()
    with pytest.raises(ConfigError, match=r"parts are missing: a-00002-of-00002\.gguf"):
        find_model(str(directory))
    (directory / "b.gguf").touch()
    with pytest.raises(ConfigError, match=r"several models in GGUF: a-00001-of-00002\.gguf, b\.gguf; name one of"):
        find_model(str(directory))


def test_a_directory_may_be_called_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").mkdir()
    (tmp_path / "m.gguf" / "config.json").write_text("{}")
    (tmp_path / "m.gguf" / "model.safetensors").touch()
    assert find_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    require_model(tmp_path / "m.gguf")


def test_a_file_that_is_not_there_is_said_so() -> None:
    with pytest.raises(ConfigError, match=r"'models/none\.gguf' is neither a directory nor .*, and no GGUF file"):
        find_model("models/none.gguf")
