"""A tokenizer as tokenizer.json would have it, from a GGUF file's metadata.

Files hold byte-level tokenizers (`gpt2`), with merges and the name of a split into words, and those of SentencePiece
(`llama`), with scores. Few files have a whole tokenizer.json, which is used as it is.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from common.base.errors import ConfigError
from common.base.json_file import Json, JsonObject
from common.checkpoint.gguf.config import TABLE
from common.checkpoint.gguf.header import Value
from common.checkpoint.gguf.model_file import GGUFModel
from common.checkpoint.gguf.pieces import merges_of_scores
from common.checkpoint.gguf.word_splits import WORD_SPLITS, WordSplit

WHOLE = "tokenizer.huggingface.json"
BYTE_LEVEL, SENTENCE_PIECE = "gpt2", "llama"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""
MAX_PIECE = 1024
"""Characters of a token of SentencePiece that merges make, because every place is tried where it may be divided."""
SPACE = "\u2581"
NO_SPLIT = (
    "the file names no split into words, or llama.cpp's fallback; serve a file that was converted later, or the "
    "model's safetensors"
)


class Tokens(NamedTuple):
    """Vocabulary of a file: texts and types by id."""

    texts: Sequence[str]
    types: Sequence[int]

    def of_type(self, *types: int) -> list[tuple[int, str]]:
        """Return ids and texts of tokens of some types."""
        pairs = zip(self.texts, self.types, strict=True)
        return [(number, text) for number, (text, kind) in enumerate(pairs) if kind in types]

    @property
    def vocabulary(self) -> dict[str, int]:
        """Return ids by text, without tokens that only fill a table up to its size."""
        fillers = {number for number, text in self.of_type(UNUSED) if text == f"[PAD{number}]"}
        return {text: number for number, text in enumerate(self.texts) if number not in fillers}


def tokenizer_entries(model: GGUFModel) -> list[tuple[str, Value]]:
    """Return the metadata that makes the tokenizer, sorted by key; the chat template is no part of it."""
    return sorted(
        (key, value)
        for key, value in model.metadata.items()
        if key.startswith("tokenizer.") and not key.startswith("tokenizer.chat_template")
    )


def tokenizer_json_of(model: GGUFModel) -> str:
    """Return the tokenizer in the format of tokenizer.json; raises ConfigError for one that cannot be built."""
    whole = model.text(WHOLE)
    if whole is not None:
        return whole
    tokens = read_tokens(model)
    if kind_of(model) == BYTE_LEVEL:
        parts = _byte_level(model, tokens, word_split_of(model))
    else:
        parts = _sentence_pieces(model, tokens)
    added = [_added(number, text, is_special=True) for number, text in tokens.of_type(CONTROL, UNKNOWN)]
    added += [_added(number, text, is_special=False) for number, text in tokens.of_type(USER_DEFINED)]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: int(token["id"])),
        **parts,
    }
    return json.dumps(content, ensure_ascii=False)


def kind_of(model: GGUFModel) -> str:
    """Return the kind of tokenizer, `gpt2` or `llama`; raises ConfigError for others."""
    kind = model.text("tokenizer.ggml.model")
    if kind not in (BYTE_LEVEL, SENTENCE_PIECE):
        raise ConfigError(
            f"{model.path}: tokenizer.ggml.model = {kind!r:.80} is not supported, only {BYTE_LEVEL!r} and "
            f"{SENTENCE_PIECE!r}; serve the model's safetensors"
        )
    return kind


def word_split_of(model: GGUFModel) -> WordSplit:
    """Return the split of a byte-level tokenizer; raises ConfigError for an unknown name."""
    name = model.text("tokenizer.ggml.pre")
    if name in WORD_SPLITS:
        return WORD_SPLITS[name]
    remedy = NO_SPLIT if name in (None, "", "default") else "serve the model's safetensors"
    raise ConfigError(
        f"{model.path}: tokenizer.ggml.pre = {name!r:.80}, supported are {', '.join(WORD_SPLITS)}, because another "
        f"split would change tokens silently; {remedy}"
    )


def read_tokens(model: GGUFModel) -> Tokens:
    """Return the vocabulary; raises ConfigError for one that contradicts itself."""
    texts, types = model.texts("tokenizer.ggml.tokens"), model.wholes("tokenizer.ggml.token_type")
    if not texts:
        raise ConfigError(f"{model.path}: has no tokenizer.ggml.tokens; serve another file of this model")
    texts = tuple(text or f"[EMPTY_{number}]" for number, text in enumerate(texts))
    if types is None:
        types = (NORMAL,) * len(texts)
    if len(types) != len(texts):
        raise ConfigError(
            f"{model.path}: {len(texts)} tokens, and {len(types)} types of tokens; serve another file of this model"
        )
    table = model.tensors.get(TABLE)
    if table is not None and table.shape[0] < len(texts):
        raise ConfigError(
            f"{model.path}: {len(texts)} tokens, and {TABLE} has {table.shape[0]} rows; serve another file"
        )
    if len(set(texts)) != len(texts):
        twice = Counter(texts).most_common(1)[0][0]
        raise ConfigError(f"{model.path}: the token {twice!r:.80} is there twice; serve another file of this model")
    return Tokens(texts, types)


def _byte_level(model: GGUFModel, tokens: Tokens, split: WordSplit) -> JsonObject:
    """Return the parts of a tokenizer whose words are bytes written as letters."""
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": split.is_gpt2}
    plain = letters | {"use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if split.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split.steps, letters]} if split.steps else letters,
        "post_processor": plain,
        "decoder": plain,
        "model": _bpe(tokens, _merges(model), ignore_merges=split.ignores_merges),
    }


def _sentence_pieces(model: GGUFModel, tokens: Tokens) -> JsonObject:
    """Return the parts of a tokenizer that merges a whole text, with a space before it, by the scores of tokens."""
    scores = model.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens.texts):
        raise ConfigError(
            f"{model.path}: {len(tokens.texts)} tokens, and {len(scores or ())} scores; serve another file of the model"
        )
    begins = model.flag("tokenizer.ggml.add_space_prefix") is not False
    unknown = next((text for _, text in tokens.of_type(UNKNOWN)), None)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins else []
    normal = {text: scores[number] for number, text in tokens.of_type(NORMAL)}
    longest = max(map(len, normal), default=0)
    if longest > MAX_PIECE:
        raise ConfigError(
            f"{model.path}: a token of {longest} characters that merges make, at most {MAX_PIECE} are supported; serve "
            "another file of this model"
        )
    if any(math.isnan(score) for score in normal.values()):
        raise ConfigError(f"{model.path}: tokenizer.ggml.scores has values that are no numbers; fetch the file again")
    return {
        "normalizer": (
            {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, spaces]} if begins else spaces
        ),
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _bpe(
            tokens, merges_of_scores(normal, tokens.vocabulary), byte_fallback=True, fuse_unk=True, unk_token=unknown
        ),
    }


def _bpe(tokens: Tokens, merges: list[tuple[str, str]], **changes: Json) -> JsonObject:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **changes,
        "vocab": tokens.vocabulary,
        "merges": merges,
    }


def _merges(model: GGUFModel) -> list[tuple[str, str]]:
    merges = model.texts("tokenizer.ggml.merges")
    if merges is None:
        raise ConfigError(f"{model.path}: has no tokenizer.ggml.merges; serve another file of this model")
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    return pairs


def _added(number: int, text: str, *, is_special: bool) -> JsonObject:
    return {
        "id": number,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": is_special,
    }
