import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from common.grammar.grammars import Grammars
from router.text.formats.shapes import CALL, CALL_END, MARKS, THINK, THINK_END
from tests.support.guided import DEMO_MODEL

VOCAB = 2048


@pytest.fixture(scope="module", params=[False, True], ids=["marks are text", "marks are tokens"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model; marks of thoughts and calls are no tokens of it, or the last ones, those of Qwen3 not special."""
    if not request.param:
        return DEMO_MODEL
    path = tmp_path_factory.mktemp("marked")
    tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    texts = {token_id: text for text, token_id in tokenizer["model"]["vocab"].items()}
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for token_id, mark in enumerate(MARKS, VOCAB - len(MARKS)):
        del tokenizer["model"]["vocab"][text := texts[token_id]]
        merges = tokenizer["model"]["merges"]
        tokenizer["model"]["merges"] = [merge for merge in merges if "".join(merge) != text]
        is_special = mark not in (THINK, THINK_END, CALL, CALL_END)
        tokenizer["added_tokens"].append({"id": token_id, "content": mark, "special": is_special} | usual)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


@pytest.fixture(scope="module")
def grammars(model_path: Path) -> Grammars:
    return Grammars.of_model(model_path, VOCAB, [0])


@pytest.fixture(scope="module")
def demo_tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_path / "tokenizer.json"))
