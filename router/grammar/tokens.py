"""The model's tokens for the compiler process, in a fifth of the memory used by workers.

llguidance keeps the whole tokenizer of tokenizer.json, the tokens as a tree, and copies of parts of the tree. The
copies speed up masks inside long strings. For checking how a text may begin, the tree is enough. So a child process
loads everything, sends the bytes of each token, and ends; the parent builds the tree.

For text forced by a grammar, the compiler takes the longest matching token, and workers take the tokenizer's choice.
The grammar allows both.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import llguidance
from msgspec import msgpack

from common.grammar.grammars import model_tokens
from common.grammar.reasons import MAX_REASON_CHARS


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
    """Load `model_tokens` without data needed only by workers; call in a single-threaded process.

    Raises RuntimeError with the reason if loading fails.
    """
    return tree_of(_told_by_a_child(path, vocab, end_ids))


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
    return msgpack.decode(data, type=Vocabulary)


def _tell(path: Path, vocab: int, end_ids: Sequence[int], write_end: int) -> NoReturn:
    """Run the child: write the vocabulary, or the error with exit status 1."""
    try:
        data = msgpack.encode(vocabulary_of(model_tokens(path, vocab, end_ids, slices=[])))
        with open(write_end, "wb") as told:
            told.write(data)
    except BaseException as error:  # noqa: BLE001 - what is behind the fork is the parent's to do
        os.write(write_end, f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS].encode())
        os._exit(1)
    os._exit(0)
