"""The model's tokens for the compiler process, in a fifth of the memory used by workers.

llguidance keeps the whole tokenizer of tokenizer.json, the tokens as a tree, and copies of parts of the tree. The
copies speed up masks inside long strings. For checking how a text may begin, the tree is enough. Everything but
the bytes of each token is freed after loading.

For text forced by a grammar, the compiler takes the longest matching token, and workers take the tokenizer's choice.
The grammar allows both.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import llguidance

from common.base.process import trim_memory
from common.grammar.grammars import model_tokens


class Vocabulary(NamedTuple):
    """Bytes and roles of all tokens."""

    texts: list[bytes]
    special_ids: list[int]
    end_ids: list[int]
    end_id: int  # first of `end_ids`


class LeanTokenizer:
    """Tokenizer interface that llguidance expects of a Python object."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens, self.special_token_ids = vocabulary.texts, vocabulary.special_ids
        self.eos_token_id = vocabulary.end_id
        self.tree: llguidance.LLTokenizer | None = None

    def __call__(self, text: bytes) -> list[int]:
        """Return tokens of a text forced by a grammar."""
        return [] if self.tree is None else self.tree.greedy_tokenize(text.decode())


def lean_tokens(path: Path, vocab: int, end_ids: Sequence[int]) -> llguidance.LLTokenizer:
    """Load `model_tokens` without data needed only by workers."""
    vocabulary = vocabulary_of(model_tokens(path, vocab, end_ids, slices=[]))
    trim_memory()
    return tree_of(vocabulary)


def vocabulary_of(tokens: llguidance.LLTokenizer) -> Vocabulary:
    """Return bytes and roles of all tokens."""
    ids = range(tokens.vocab_size)
    texts = [tokens.decode_bytes([token_id]) for token_id in ids]
    return Vocabulary(texts, [*filter(tokens.is_special_token, ids)], tokens.eos_tokens, tokens.eos_token)


def tree_of(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """Build the tree of tokens, without anything else."""
    tokenizer = LeanTokenizer(vocabulary)
    wrapped = llguidance.TokenizerWrapper(tokenizer)
    tree = llguidance.LLTokenizer(
        wrapped, n_vocab=len(vocabulary.texts), eos_token=vocabulary.end_ids or None, slices=[]
    )
    tokenizer.tree = tree
    tokenizer.tokens = wrapped.tokens = []  # the tree has copies
    return tree
