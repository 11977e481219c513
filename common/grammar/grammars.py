"""Inputs of llguidance: the model's tokens, limits, and compiled grammars."""

import json
import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import llguidance

from common.checkpoint.files import TOKENIZER, open_model
from common.checkpoint.gguf.model_file import is_gguf

logger = logging.getLogger(__name__)

LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=500_000,  # about 10 ms
    step_lexer_fuel=100_000,  # about 7 ms
    step_max_items=20_000,  # 1 ms, or 500 ms with long rows of items, because each item is searched in the whole row
    max_lexer_states=20_000,  # about 40 MB
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Limits of a grammar and of a mask. The limits bound steps, not time; `costs` bounds the time."""
SILENT = 0


class Grammars:
    """Compiler of grammars for a model's tokens.

    `end_ids` are the tokens allowed by a grammar at the end of a text.
    """

    def __init__(self, tokens: llguidance.LLTokenizer) -> None:
        self.vocab: int = tokens.vocab_size
        self.end_ids = tuple(tokens.eos_tokens)
        self._tokens = tokens

    @staticmethod
    def of_model(path: Path, vocab: int, end_ids: Sequence[int]) -> "Grammars":
        """Load the tokens of the model at `path`, see `model_tokens`."""
        return Grammars(model_tokens(path, vocab, end_ids))

    def compile(self, grammar: str) -> llguidance.LLMatcher:
        """Return a matcher at the beginning of a text; `is_error` is true for a wrong or too large grammar."""
        return llguidance.LLMatcher(self._tokens, grammar, log_level=SILENT, limits=LIMITS)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of special tokens by text; a grammar can only allow such a token by its id."""
        tokens = self._tokens
        special = filter(tokens.is_special_token, range(self.vocab))
        return {tokens.decode_bytes([each]).decode(errors="replace"): each for each in special}

    def first_token(self, text: bytes) -> int:
        """Return the token of the text's first byte, which may be part of a character.

        A single byte never gives a special token, because special tokens are longer.
        """
        token_ids: list[int] = self._tokens.tokenize_bytes(text[:1])
        return token_ids[0]


def model_tokens(
    path: Path, vocab: int, end_ids: Sequence[int], slices: list[str] | None = None
) -> llguidance.LLTokenizer:
    """Load the tokens of the model at `path`, of which it has `vocab`; drop tokens that it lacks.

    End ids missing in its tokenizer are dropped with a warning. `slices` are parts of the tokens to compute masks
    faster; None takes llguidance's own.
    """
    files = open_model(path)
    source = files.tokenizer() if is_gguf(path) else str(path / TOKENIZER)  # a text, or the name of a file
    try:
        return llguidance.LLTokenizer(source, n_vocab=vocab, eos_token=list(end_ids) or None, slices=slices)
    except ValueError:
        size = llguidance.LLTokenizer(source, slices=[]).vocab_size
    known = [token_id for token_id in end_ids if token_id < min(size, vocab)]
    if len(known) < len(end_ids):
        logger.warning("grammars end no text with %s: the tokenizer has %d tokens", set(end_ids) - set(known), size)
    if size > vocab:
        source = first_tokens(files.tokenizer(), vocab)
    return llguidance.LLTokenizer(source, n_vocab=vocab, eos_token=known or None, slices=slices)


def first_tokens(tokenizer: str, vocab: int) -> str:
    """Return the text of a tokenizer.json without tokens from id `vocab` on."""
    content: dict[str, Any] = json.loads(tokenizer)
    model = content["model"]
    content["added_tokens"] = [token for token in content.get("added_tokens", ()) if token["id"] < vocab]
    if isinstance(model["vocab"], list):
        model["vocab"] = model["vocab"][:vocab]
    else:
        kept = model["vocab"] = {text: token_id for text, token_id in model["vocab"].items() if token_id < vocab}
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", ())]
        model["merges"] = [merge for merge in merges if "".join(merge) in kept]
    return json.dumps(content, ensure_ascii=False)
