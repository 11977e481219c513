"""The router's tokenizer is the same from a GGUF file as from the directory that the file was made of."""

import json
import shutil
from pathlib import Path

import gguf
import pytest

from common.base.errors import ConfigError
from common.grammar.grammars import Grammars
from common.settings.config import ModelSection
from router.grammar.tokens import lean_tokens
from router.text.tokenizer import Tokenizer
from tests.support.gguf_files import write_gguf

DEMO_MODEL = Path(__file__).parents[3] / "deploy" / "demo_model"
TEXTS = ["", "ROMEO:\nWhat 12345 lights?  \n\n", "naïve 🙂 日本語 <|endoftext|> end", "a" * 3000 + " b" * 3000]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "demo.gguf", DEMO_MODEL)


def test_texts_chats_and_limits_are_those_of_the_directory(path: Path) -> None:
    ours, theirs = Tokenizer(ModelSection(path=str(path))), Tokenizer(ModelSection(path=str(DEMO_MODEL)))
    assert ours.encode(TEXTS, 10**6) == theirs.encode(TEXTS, 10**6)
    for ids in theirs.encode(TEXTS, 10**6):
        assert ours.decode(ids) == theirs.decode(ids) and ours.decode_all(ids) == theirs.decode_all(ids)
    assert ours.cuts_texts and theirs.cuts_texts
    assert (ours.info.vocab_size, ours.info.max_model_len) == (theirs.info.vocab_size, theirs.info.max_model_len)
    assert ours.info.eos_token_ids == theirs.info.eos_token_ids == (0,)
    assert ours.info.name == "demo" and ours.info.model_fingerprint != theirs.info.model_fingerprint
    assert ours.chat_template is not None and theirs.chat_template is not None
    chat = [{"role": "user", "content": "Where art thou?"}]
    written = [each.chat_template.render(chat, {}, 1000) for each in (ours, theirs) if each.chat_template]
    assert written[0] == written[1] != ""
    assert ours.control_tokens.texts == theirs.control_tokens.texts


def test_grammars_know_the_same_tokens(path: Path) -> None:
    ours, theirs = Grammars.of_model(path, 2048, [0]), Grammars.of_model(DEMO_MODEL, 2048, [0])
    assert (ours.vocab, ours.end_ids, ours.special_tokens) == (theirs.vocab, theirs.end_ids, theirs.special_tokens)
    lean = [lean_tokens(each, 2048, [0]) for each in (path, DEMO_MODEL)]
    assert [lean[0].decode_bytes([i]) for i in range(2048)] == [lean[1].decode_bytes([i]) for i in range(2048)]


@pytest.mark.parametrize("begins", [True, False])
def test_the_first_token_stands_before_texts_as_the_file_says(begins: bool, tmp_path: Path) -> None:
    """Whether the chat template writes it or not."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_bos_token_id(0)
        writer.add_add_bos_token(begins)

    directory = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "{{ bos_token }}"}))
    tokenizer = Tokenizer(ModelSection(path=str(write_gguf(tmp_path / "m.gguf", directory, metadata=add))))
    (ids,) = tokenizer.encode(["hello"], 100)
    assert (ids[0] == 0) is begins


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", DEMO_MODEL, metadata=lambda writer: writer.add_string("tokenizer.huggingface.json", "{}")
    )
    with pytest.raises(ConfigError, match=r"m\.gguf: .*; fetch the model's own"):
        Tokenizer(ModelSection(path=str(path)))
