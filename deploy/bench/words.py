"""Texts of known length, made of words with a token each at any place, so all servers count equally."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from common.checkpoint.files import TOKENIZER, open_model
from common.checkpoint.gguf.model_file import is_gguf
from deploy.bench.workload import Prompt

WORD = re.compile(r"[Ġ▁][a-z]+")
"""A space and letters, in byte-level and SentencePiece spelling: a single piece for any pre-tokenizer."""


class Words:
    """Words of the tokenizer of a directory or a GGUF file; raises ValueError without one, or without words."""

    def __init__(self, path: Path) -> None:
        if not is_gguf(path) and not (path / TOKENIZER).is_file():
            raise ValueError(f"{path} has no {TOKENIZER}; name the directory of the model that is served")
        self._tokenizer = Tokenizer.from_str(open_model(path).tokenizer())
        self._word_of = self._words()
        self.ids = sorted(self._word_of)
        if not self.ids:
            raise ValueError(f"{path} has no token that is a word")

    def written(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Convert prompts of word ids to texts."""
        return [self._written(prompt) for prompt in prompts]

    def _words(self) -> dict[int, str]:
        """Return by id the words that the tokenizer encodes as a single token."""
        tokens = {id_: f" {token[1:]}" for token, id_ in self._tokenizer.get_vocab().items() if WORD.fullmatch(token)}
        encodings = self._tokenizer.encode_batch(list(tokens.values()), add_special_tokens=False)
        found = zip(tokens.items(), encodings, strict=True)
        return {token_id: word for (token_id, word), encoding in found if encoding.ids == [token_id]}

    def _written(self, prompt: Prompt) -> Prompt:
        text = "".join(self._word_of[token_id] for token_id in prompt.token_ids)
        if self._tokenizer.encode(text, add_special_tokens=False).ids != prompt.token_ids:
            raise ValueError(f"{text[:80]!r}... has other tokens than its words alone: send ids, without --tokenizer")
        num_tokens = len(prompt.token_ids) + self._tokenizer.num_special_tokens_to_add(is_pair=False)
        return replace(prompt, content=text, num_text_tokens=num_tokens)
