"""A model's tokens for the process that compiles grammars, in a fifth of the memory that workers have them in.

llguidance keeps the whole tokenizer of a tokenizer.json, the tokens as a tree, and parts of the tree again, by which
masks amid long strings come sooner. To see what a text of a grammar may begin with, the tree is enough. So a child
loads all that, tells what each token is, and ends, and the tree is made of it. Where a grammar forces a text, this
process takes the longest token that it begins with, workers the tokenizer's: both are tokens that the grammar allows.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import llguidance
import msgpack

from common.grammar.grammars import model_tokens
from common.grammar.reasons import MAX_REASON_CHARS


class Vocabulary(NamedTuple):
    """What each token is."""

    texts: list[bytes]
    special_ids: list[int]
    end_ids: list[int]
    end_id: int  # of these the one that comes first


class LeanTokenizer:
    """What llguidance asks of a tokenizer in Python."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens, self.special_token_ids = vocabulary.texts, vocabulary.special_ids
        self.eos_token_id = vocabulary.end_id
        self.tree: llguidance.LLTokenizer | None = None

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text that a grammar forces."""
        return [] if self.tree is None else self.tree.greedy_tokenize(text.decode())


def lean_tokens(path: Path, vocab: int, end_ids: Sequence[int]) -> llguidance.LLTokenizer:
    """Those of `model_tokens` without what only workers need; call in a process of one thread.

    Raises RuntimeError, saying why, where these cannot be loaded.
    """
    return tree_of(_told_by_a_child(path, vocab, end_ids))


def vocabulary_of(tokens: llguidance.LLTokenizer) -> Vocabulary:
    """Of all tokens."""
    ids = range(tokens.vocab_size)
    texts = [tokens.decode_bytes([token_id]) for token_id in ids]
    return Vocabulary(texts, [*filter(tokens.is_special_token, ids)], tokens.eos_tokens, tokens.eos_token)


def tree_of(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """The tokens, with nothing beside them."""
    tokenizer = LeanTokenizer(vocabulary)
    wrapped = llguidance.TokenizerWrapper(tokenizer)
    tree = llguidance.LLTokenizer(
        wrapped, n_vocab=len(vocabulary.texts), eos_token=vocabulary.end_ids or None, slices=[]
    )
    tokenizer.tree = tree
    tokenizer.tokens = wrapped.tokens = []  # the tree has them
    return tree


def _told_by_a_child(path: Path, vocab: int, end_ids: Sequence[int]) -> Vocabulary:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _tell(path, vocab, end_ids, write_end)
    os.close(write_end)
    with open(read_end, "rb") as told:
        data = told.read()
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(f"the tokens of {path} could not be loaded: {data.decode(errors='replace')}")
    return Vocabulary(*msgpack.unpackb(data))


def _tell(path: Path, vocab: int, end_ids: Sequence[int], write_end: int) -> NoReturn:
    """The life of the child."""
    try:
        data = msgpack.packb(vocabulary_of(model_tokens(path, vocab, end_ids, slices=[])))
        with open(write_end, "wb") as told:
            told.write(data)
    except BaseException as error:  # noqa: BLE001 - what is behind the fork is the parent's to do
        os.write(write_end, f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS].encode())
        os._exit(1)
    os._exit(0)
