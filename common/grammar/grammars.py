"""What llguidance needs to follow grammars: the model's tokens, limits, and grammars that are compiled.

Compiled ones are kept, as requests share them: a copy of one takes microseconds, compiling it up to a second.
"""

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import llguidance

from common.malloc import trim_memory

logger = logging.getLogger(__name__)

MAX_COMPILED = 64
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=500_000,  # about 10 ms
    step_lexer_fuel=100_000,  # about 7 ms
    step_max_items=20_000,  # about 1 ms
    max_lexer_states=20_000,  # about 40 MB
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Of one grammar: what compiling it and one mask may take. What needs more ends in an error, not in a long wait."""
SILENT = 0


class Grammars:
    """Compiles grammars for a model's tokens. Threads may share it.

    `end_ids` are the tokens that a grammar lets follow where a text may end.
    """

    def __init__(self, tokens: llguidance.LLTokenizer) -> None:
        self.vocab: int = tokens.vocab_size
        self.end_ids = tuple(tokens.eos_tokens)
        self._tokens = tokens
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = Lock()

    @staticmethod
    def of_model(path: Path, vocab: int, end_ids: Sequence[int]) -> "Grammars":
        """For the model in directory `path`, see `model_tokens`."""
        begin_s = time.monotonic()
        grammars = Grammars(model_tokens(path, vocab, end_ids))
        trim_memory()  # a quarter of what loading them took
        logger.info("ready for grammars after %.1f s", time.monotonic() - begin_s)
        return grammars

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

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        """The same, a copy of one that is kept."""
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
        if known is None:
            known = self.compile(grammar)
            with self._lock:
                self._compiled[grammar] = known
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
        return known.deep_copy()


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
