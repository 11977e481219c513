"""The demo model with marks of thoughts and calls as tokens, the last of its vocabulary."""

import json
from pathlib import Path

from router.text.formats.shapes import CALL, CALL_END, MARKS, THINK, THINK_END
from tests.support.guided import DEMO_MODEL

VOCAB = 2048
NOT_SPECIAL = (THINK, THINK_END, CALL, CALL_END)
"""As of Qwen3."""


def write_marked_tokenizer(path: Path) -> None:
    """Write tokenizer.json into the directory `path`."""
    tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    model = tokenizer["model"]
    texts = {token_id: text for text, token_id in model["vocab"].items()}
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for token_id, mark in enumerate(MARKS, VOCAB - len(MARKS)):
        del model["vocab"][text := texts[token_id]]
        model["merges"] = [merge for merge in model["merges"] if "".join(merge) != text]
        tokenizer["added_tokens"].append({"id": token_id, "content": mark, "special": mark not in NOT_SPECIAL} | usual)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))


def write_marked_model(path: Path, chat_template: str) -> None:
    """Write a whole model into the directory `path`, with this chat template."""
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        (path / file).symlink_to(DEMO_MODEL / file)
    write_marked_tokenizer(path)
    config = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": chat_template}))
