from pathlib import Path

import pytest
from tokenizers import Tokenizer

from common.grammar.grammars import Grammars
from tests.support.guided import DEMO_MODEL
from tests.support.marked_model import VOCAB, write_marked_tokenizer


@pytest.fixture(scope="module", params=[False, True], ids=["marks are text", "marks are tokens"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model; marks of thoughts and calls are no tokens of it, or the last ones."""
    if not request.param:
        return DEMO_MODEL
    path = tmp_path_factory.mktemp("marked")
    write_marked_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def grammars(model_path: Path) -> Grammars:
    return Grammars.of_model(model_path, VOCAB, [0])


@pytest.fixture(scope="module")
def demo_tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_path / "tokenizer.json"))
