"""A tokenizer built from metadata gives the tokens of the tokenizer that the metadata was made of."""

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from common.base.errors import ConfigError
from common.checkpoint.gguf.block_types import TYPES
from common.checkpoint.gguf.header import StoredTensor, Value
from common.checkpoint.gguf.model_file import GGUFModel
from common.checkpoint.gguf.special_tokens import end_ids_of, tokenizer_config_of
from common.checkpoint.gguf.tokenizer import read_tokens, tokenizer_entries, tokenizer_json_of
from common.checkpoint.gguf.word_splits import WORD_SPLITS
from router.text.text_cuts import WORDS, cuts_of

DEMO_MODEL = Path(__file__).parents[3] / "deploy" / "demo_model"
PIECES = [
    "hello", "World", "don't", "I'LL", "we'Ve", "12345", "1,234.5", "  ", "   \n", "\n\n", "\t", "🙂", "👩‍👩‍👧",
    "日本語", "漢字かな", "한국어", "مرحبا", "हिन्दी", "naïve", "e\u0301", "Å", "'s", "'S", " a", "ß", "ﬁ", "½", "Ⅷ",
    "²", "\r\n", "\u00a0", "\u3000", "{", "}", ";;", "//", "http://x.y/z?q=1", "\uff21\uff22", "\u200b", "camelCase",
    "HTTPServer", "snake_case", "\x7f", "…", "—", "ǅ", "/\n", "\n/", "<|im_start|>", "<think>", "</think>",
    "<|endoftext|>",
]  # fmt: skip


def texts(count: int = 400) -> Iterator[str]:
    draw = random.Random(0)
    yield from PIECES
    for _ in range(count):
        parts = (draw.choice(PIECES) + draw.choice(["", "", " "]) for _ in range(draw.randint(1, 12)))
        yield "".join(parts)


def model_of(**entries: Value) -> GGUFModel:
    """A model whose metadata has these entries, `tokenizer.ggml.` before the names without a dot."""
    named = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in entries.items()}
    return GGUFModel(Path("m.gguf"), named, {})


def byte_level(original: Tokenizer, pre: str, **others: Value) -> GGUFModel:
    """The metadata that llama.cpp's converter writes for a byte-level tokenizer, in a table with five more rows."""
    content = json.loads(original.to_str())
    added = {token["id"]: token for token in content["added_tokens"]}
    by_id = {number: text for text, number in original.get_vocab().items()}
    ids = range(max(by_id) + 6)
    kinds = [4 - added[i]["special"] if i in added else 1 if i in by_id else 5 for i in ids]
    return model_of(
        model="gpt2",
        pre=pre,
        tokens=tuple(by_id.get(i, f"[PAD{i}]") for i in ids),
        token_type=tuple(kinds),
        merges=tuple(" ".join(merge) for merge in content["model"]["merges"]),
        **others,
    )


def trained(split: pre_tokenizers.PreTokenizer | None, *, nfc: bool, ignore_merges: bool) -> Tokenizer:
    """A small byte-level tokenizer with the parts of a published one, trained on texts of the tests."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    last = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=split is None or isinstance(split, pre_tokenizers.Digits)
    )
    tokenizer.pre_tokenizer = last if split is None else pre_tokenizers.Sequence([split, last])
    tokenizer.normalizer = normalizers.NFC() if nfc else None
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(100), trainer)
    tokenizer.add_tokens([tokenizers.AddedToken("<think>", normalized=False, special=False)])
    return tokenizer


def split_by(name: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(WORDS[name]), "isolated")


PUBLISHED: dict[str, tuple[Callable[[], pre_tokenizers.PreTokenizer | None], bool, bool]] = {
    "gpt-2": (lambda: None, False, False),
    "smollm": (lambda: pre_tokenizers.Digits(individual_digits=True), False, False),
    "qwen2": (lambda: split_by("Qwen 2"), True, False),
    "qwen35": (lambda: split_by("Qwen 3.5"), True, False),
    "llama-bpe": (lambda: split_by("Llama 3"), False, True),
    "llama3": (lambda: split_by("Llama 3"), False, True),
    "llama-v3": (lambda: split_by("Llama 3"), False, True),
    "tekken": (lambda: split_by("Mistral Nemo"), False, True),
    "gpt-4o": (lambda: split_by("gpt-oss"), False, False),
}
"""By name in GGUF: the published split into words, NFC, and whether words that are tokens need no merges."""


def test_every_split_is_tested() -> None:
    assert PUBLISHED.keys() == WORD_SPLITS.keys()


@pytest.mark.parametrize("pre", PUBLISHED)
def test_tokens_are_the_original_s(pre: str) -> None:
    split, nfc, ignore_merges = PUBLISHED[pre]
    original = trained(split(), nfc=nfc, ignore_merges=ignore_merges)
    ours = Tokenizer.from_str(tokenizer_json_of(byte_level(original, pre)))
    assert ours.get_vocab() == original.get_vocab()
    for text in texts():
        ids = original.encode(text).ids
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
    assert ours.decode([ours.get_vocab_size() + 1]) == "", "a row of the table without a token"
    assert {i: t.special for i, t in ours.get_added_tokens_decoder().items()} == {
        i: t.special for i, t in original.get_added_tokens_decoder().items()
    }


def test_splits_allow_cuts_of_long_texts() -> None:
    original = trained(None, nfc=False, ignore_merges=False)
    for pre in WORD_SPLITS.keys() - {"smollm"}:
        assert cuts_of(Tokenizer.from_str(tokenizer_json_of(byte_level(original, pre)))) is not None, pre


def test_another_split_gives_other_tokens() -> None:
    """So that the test above would notice: every split differs from every other on these texts."""
    original = trained(None, nfc=False, ignore_merges=False)
    different = {"gpt-2", "smollm", "qwen2", "qwen35", "llama-bpe", "tekken", "gpt-4o"}
    built = {pre: Tokenizer.from_str(tokenizer_json_of(byte_level(original, pre))) for pre in different}
    found = {str([tokenizer.encode(text).ids for text in texts()]) for tokenizer in built.values()}
    assert len(found) == len(different)


def test_the_demo_model_s_tokenizer_comes_back() -> None:
    original = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    ours = Tokenizer.from_str(tokenizer_json_of(byte_level(original, "gpt-2")))
    for text in texts():
        assert ours.encode(text).ids == original.encode(text).ids


def pieces_model(**others: Value) -> GGUFModel:
    """A vocabulary of SentencePiece: special tokens, bytes, pieces with their scores, a user's token."""
    words = ["▁", "h", "e", "l", "o", "w", "r", "d", "日", "本", "1", "2"]
    pieces = ["he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor", "ld", "▁world", "lo", "el", "日本", "▁▁", "12"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *words, "<tool>"]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) + len(words)), 4]
    scores = [0.0] * 259 + [-float(number) for number in range(len(pieces))] + [-1000.0] * len(words) + [0.0]
    return model_of(model="llama", tokens=tuple(tokens), token_type=tuple(types), scores=tuple(scores), **others)


def merged(model: GGUFModel, text: str) -> list[int]:
    """SentencePiece's rule: of all neighbours that make a piece, those of the best score merge first, from the left."""
    tokens, scores = model.texts("tokenizer.ggml.tokens"), model.numbers("tokenizer.ggml.scores")
    kinds = model.wholes("tokenizer.ggml.token_type")
    assert tokens is not None and scores is not None and kinds is not None
    ids = {token: number for number, token in enumerate(tokens) if kinds[number] == 1}
    parts = [*text]
    while True:
        pairs = [(-scores[ids[a + b]], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ids]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        number for part in parts for number in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])
    ]


@pytest.mark.parametrize("begins", [True, False])
def test_pieces_merge_by_their_scores(begins: bool) -> None:
    model = pieces_model(**({} if begins else {"add_space_prefix": False}))
    ours = Tokenizer.from_str(tokenizer_json_of(model))
    draw = random.Random(0)
    for _ in range(500):
        parts = ["hello", "world", "llo", "he", " ", "  ", "日本", "本", "12", "é", "🙂", "\n", "lo", "wor", "el"]
        text = "".join(draw.choice(parts) for _ in range(draw.randint(1, 9)))
        spaced = ("▁" if begins else "") + text.replace(" ", "▁")
        ids = ours.encode(text).ids
        assert ids == merged(model, spaced), text
        assert ours.decode(ids) == text
    tool = 259 + 15 + 12
    added = ours.get_added_tokens_decoder()
    assert {number: (token.content, token.special) for number, token in added.items()} == {
        0: ("<unk>", True), 1: ("<s>", True), 2: ("</s>", True), tool: ("<tool>", False),
    }  # fmt: skip
    after = ours.encode("he<tool>he").ids
    assert after[after.index(tool) + 1 :] == merged(model, "▁he" if begins else "he")


def test_scores_in_another_order_give_other_tokens() -> None:
    model = pieces_model()
    scores = model.numbers("tokenizer.ggml.scores")
    assert scores is not None
    entries = {**model.metadata, "tokenizer.ggml.scores": tuple(-score for score in scores)}
    reverse = Tokenizer.from_str(tokenizer_json_of(GGUFModel(model.path, entries, {})))
    assert reverse.encode("hello world").ids != merged(model, "▁hello▁world")


def test_a_whole_tokenizer_in_the_file_comes_first() -> None:
    whole = (DEMO_MODEL / "tokenizer.json").read_text()
    assert tokenizer_json_of(model_of(**{"tokenizer.huggingface.json": whole})) == whole


def test_special_tokens_are_named() -> None:
    model = byte_level(
        trained(None, nfc=False, ignore_merges=False), "qwen2", bos_token_id=0, eos_token_id=1, padding_token_id=10**6,
        **{"tokenizer.chat_template": "{{ bos_token }}"},
    )  # fmt: skip
    assert tokenizer_config_of(model) == {
        "bos_token": "<|endoftext|>", "eos_token": "<|im_start|>", "chat_template": "{{ bos_token }}",
        "add_bos_token": False,
    }  # fmt: skip
    assert end_ids_of(model) == [1, 0], "the one named, and one known by its text"
    assert tokenizer_config_of(pieces_model()) == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True,
    }  # fmt: skip
    assert end_ids_of(pieces_model(eot_token_id=260)) == [2, 260]


@pytest.mark.parametrize(("pre", "begins"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)])
def test_the_first_token_is_wanted_as_the_file_or_the_split_says(pre: str, begins: bool) -> None:
    original = trained(None, nfc=False, ignore_merges=False)
    assert tokenizer_config_of(byte_level(original, pre))["add_bos_token"] == begins
    for told in (True, False):
        assert tokenizer_config_of(byte_level(original, pre, add_bos_token=told))["add_bos_token"] == told


def test_the_chat_template_is_no_part_of_the_tokenizer() -> None:
    model = pieces_model(**{"tokenizer.chat_template": "x", "general.name": "y"})
    assert tokenizer_entries(model) == tokenizer_entries(pieces_model())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a kind": ({"model": "bert"}, r"tokenizer\.ggml\.model = 'bert' is not supported, only 'gpt2' and 'llama'"),
    "no kind": ({"model": None}, r"tokenizer\.ggml\.model = None"),
    "a split": ({"pre": "deepseek-v3"}, r"pre = 'deepseek-v3', supported are .*qwen2.* because another split would"),
    "the fallback": ({"pre": "default"}, r"names no split into words, or llama\.cpp's fallback; serve a file that"),
    "no split": ({"pre": None}, r"pre = None, .*names no split into words"),
    "no tokens": ({"tokens": None}, r"has no tokenizer\.ggml\.tokens"),
    "tokens of numbers": ({"tokens": (1, 2)}, r"tokenizer\.ggml\.tokens = \(1, 2\), an array of strings is needed"),
    "types": ({"token_type": (1,)}, r"\d+ tokens, and 1 types of tokens"),
    "types of texts": ({"token_type": (1.5,)}, r"token_type = \(1\.5,\), an array of whole numbers is needed"),
    "a token twice": ({"tokens": ("a", "b", "a"), "token_type": (1, 1, 1)}, r"the token 'a' is there twice"),
    "no merges": ({"merges": None}, r"has no tokenizer\.ggml\.merges"),
    "no scores": ({"model": "llama"}, r"\d+ tokens, and 0 scores"),
    "no score": (
        {"model": "llama", "tokens": ("a", "b"), "token_type": (1, 1), "scores": (0.0, math.nan)},
        r"scores has values that are no numbers",
    ),
    "a long token": (
        {"model": "llama", "tokens": ("a", "b" * 1_000_000), "token_type": (1, 1), "scores": (0.0, 1.0)},
        r"a token of 1000000 characters that merges make, at most 1024 are supported",
    ),
    "a template": ({"tokenizer.chat_template": 7}, r"tokenizer\.chat_template = 7, a string is needed"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_built_is_refused_by_name(name: str) -> None:
    changes, message = WRONG[name]
    good = byte_level(trained(None, nfc=False, ignore_merges=False), "gpt-2").metadata
    changed = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    entries = {key: value for key, value in {**good, **changed}.items() if value is not None}
    model = GGUFModel(Path("m.gguf"), entries, {})
    with pytest.raises(ConfigError, match=rf"m\.gguf: .*{message}"):
        tokenizer_json_of(model)
        tokenizer_config_of(model)


def test_a_table_without_rows_for_all_tokens_is_refused() -> None:
    model = pieces_model()
    num_tokens = len(read_tokens(model).texts)
    few = StoredTensor(Path("m.gguf"), TYPES[0], (num_tokens - 1, 4), 0)
    with pytest.raises(ConfigError, match=rf"{num_tokens} tokens, and token_embd\.weight has {num_tokens - 1} rows"):
        read_tokens(replace(model, tensors={"token_embd.weight": few}))
