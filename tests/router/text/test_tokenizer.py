import json
import shutil
from pathlib import Path

import pytest

from common.base.errors import ConfigError, RequestError
from common.models.reading import read_config
from common.settings.config import ModelSection
from router.text.tokenizer import Tokenizer
from tests.router.conftest import MAX_MODEL_LEN
from tests.support.checkpoints import VOCAB, write_checkpoint


@pytest.fixture
def model_copy(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "copy"))


def test_generation_config_knows_the_end_of_text_better_than_config(model_copy: Path) -> None:
    assert Tokenizer(ModelSection(path=str(model_copy))).info.eos_token_ids == (0,)
    (model_copy / "generation_config.json").unlink()
    assert Tokenizer(ModelSection(path=str(model_copy))).info.eos_token_ids == (5,)


def test_a_text_with_a_token_that_the_model_lacks_is_refused(model_copy: Path) -> None:
    vocab = Tokenizer(ModelSection(path=str(model_copy))).info.vocab_size
    content = json.loads((model_copy / "tokenizer.json").read_text())
    added = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append({"id": vocab, "content": "<image>", "special": True, **added})
    (model_copy / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer(ModelSection(path=str(model_copy)))
    assert tokenizer.encode(["a b"], MAX_MODEL_LEN)
    with pytest.raises(RequestError, match=f"has '<image>', token {vocab} of .* tokens 0 to {vocab - 1}: leave it out"):
        tokenizer.encode(["a b", "a <image> b"], MAX_MODEL_LEN)


def test_model_len_is_capped_by_the_option_and_never_beyond_the_model(model_dir: Path) -> None:
    assert Tokenizer(ModelSection(path=str(model_dir))).info.max_model_len == MAX_MODEL_LEN
    assert Tokenizer(ModelSection(path=str(model_dir), max_len=100)).info.max_model_len == 100
    with pytest.raises(ConfigError, match=str(MAX_MODEL_LEN)):
        Tokenizer(ModelSection(path=str(model_dir), max_len=MAX_MODEL_LEN + 1))


@pytest.mark.parametrize(
    ("yarn", "positions"),
    [({"original_max_position_embeddings": 384}, 1536), ({"original_max_position_embeddings": 64}, 512), ({}, 2048)],
)
def test_router_and_model_know_the_positions_that_yarn_adds(
    tmp_path: Path, yarn: dict[str, int], positions: int
) -> None:
    write_checkpoint("qwen3-tied", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    table = {"type": "yarn", "factor": 4.0, **yarn}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": None, "rope_scaling": table}))
    assert Tokenizer(ModelSection(path=str(tmp_path))).info.max_model_len == positions
    assert read_config(tmp_path).max_positions == positions


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("config.json", None),
        ("config.json", "[]"),
        ("config.json", "{"),
        ("config.json", json.dumps({"vocab_size": 0, "max_position_embeddings": 9})),
        ("config.json", json.dumps({"vocab_size": 9, "max_position_embeddings": "9"})),
        ("config.json", json.dumps({"vocab_size": 9, "max_position_embeddings": 10**10})),
        ("config.json", json.dumps({"vocab_size": 9, "max_position_embeddings": 9, "rope_scaling": [1]})),
        ("config.json", '{"a":' * 100_000),
        ("generation_config.json", json.dumps({"eos_token_id": "x"})),
        ("generation_config.json", json.dumps({"eos_token_id": [10**20]})),
    ],
)
def test_a_broken_model_directory_is_named(model_copy: Path, name: str, content: str | None) -> None:
    path = model_copy / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ConfigError, match=str(model_copy)):
        Tokenizer(ModelSection(path=str(model_copy)))


def test_a_text_model_inside_another_has_its_sizes_and_ends(tmp_path: Path) -> None:
    write_checkpoint("qwen3-tied", tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    inner = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "vocab_size": 9, "text_config": inner}))
    info = Tokenizer(ModelSection(path=str(tmp_path))).info
    assert (info.vocab_size, info.max_model_len, info.eos_token_ids) == (VOCAB, 512, (1,))


@pytest.mark.parametrize("text", [{"model_type": "gemma3_text"}, {"hidden_size": 2560}])
def test_sizes_that_a_published_file_leaves_out_are_known(tmp_path: Path, text: dict[str, object]) -> None:
    write_checkpoint("gemma3", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    info = Tokenizer(ModelSection(path=str(tmp_path))).info
    assert (info.vocab_size, info.max_model_len) == (262_208, 131_072)
