"""What llguidance needs to follow grammars: the model's tokens, limits, and grammars that are compiled."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import llguidance

logger = logging.getLogger(__name__)

LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=500_000,  # about 10 ms
    step_lexer_fuel=100_000,  # about 7 ms
    step_max_items=20_000,  # 1 ms, or 500 where a row of items is long: each is looked for among all of its row
    max_lexer_states=20_000,  # about 40 MB
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Limits of one grammar and one mask. They bound steps, not time, so whoever follows a grammar bounds that, too."""
SILENT = 0


class Grammars:
    """Compiles grammars for a model's tokens.

    `end_ids` are the tokens that a grammar lets follow where a text may end.
    """

    def __init__(self, tokens: llguidance.LLTokenizer) -> None:
        self.vocab: int = tokens.vocab_size
        self.end_ids = tuple(tokens.eos_tokens)
        self._tokens = tokens

    @staticmethod
    def of_model(path: Path, vocab: int, end_ids: Sequence[int]) -> "Grammars":
        """Load those of the model in directory `path`, see `model_tokens`."""
        return Grammars(model_tokens(path, vocab, end_ids))

    def compile(self, grammar: str) -> llguidance.LLMatcher:
        """At the beginning of a text; its `is_error` tells of a grammar that is wrong or too large."""
        return llguidance.LLMatcher(self._tokens, grammar, log_level=SILENT, limits=LIMITS)

    def has_token(self, name: str) -> bool:
        """Whether a grammar can name the token that is this text, `<...>`, and only so has it."""
        return not self.compile(json.dumps({"grammars": [{"lark_grammar": f"start: {name}"}]})).is_error()

    def first_token(self, text: bytes) -> int:
        """Of the text's first byte alone, which may be amid a character: a token that is named only has more."""
        token_ids: list[int] = self._tokens.tokenize_bytes(text[:1])
        return token_ids[0]


def model_tokens(
    path: Path, vocab: int, end_ids: Sequence[int], slices: list[str] | None = None
) -> llguidance.LLTokenizer:
    """All `vocab` of the model in directory `path`; end ids that its tokenizer.json cannot say are left out.

    `slices` are parts of the tokens by which masks come sooner, llguidance's own if it is None.
    """
    file = str(path / "tokenizer.json")
    try:
        return llguidance.LLTokenizer(file, n_vocab=vocab, eos_token=list(end_ids) or None, slices=slices)
    except ValueError:
        size = llguidance.LLTokenizer(file, slices=[]).vocab_size
        known = [token_id for token_id in end_ids if token_id < size]
        if len(known) == len(end_ids):
            raise
        logger.warning("grammars end no text with %s: tokenizer.json has %d tokens", set(end_ids) - set(known), size)
        return llguidance.LLTokenizer(file, n_vocab=vocab, eos_token=known or None, slices=slices)
