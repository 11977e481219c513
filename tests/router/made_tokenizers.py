"""Small tokenizers that split texts into words as well-known models do."""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from router.text.text_cuts import WORDS
from tests.router.conftest import TEXT

END, TURN, THINK = "<|endoftext|>", "<|im_start|>", "<think>"
KINDS = (*WORDS, "GPT-2")
WHOLE = "Gemma"
"""The kind without words."""
CODE = "123 1234 don't we're it's IT'S 他说\uff0c你好。世界\uff01 {'a': 1, \"b\": 2}\n\n    return x\n\tif y:\r\n" * 4


def made(kind: str, normalizer: Any = None) -> Tokenizer:
    """One that has the words of `kind`, 600 tokens, and added ones; the Llama 3 kind puts a token before each text."""
    if kind == WHOLE:
        return made_whole([*TEXT.split("\n"), *CODE.split("\n"), "\n" * 40])
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "Llama 3"))
    tokenizer.pre_tokenizer = splitter(kind)
    if kind.startswith("Qwen"):
        tokenizer.normalizer = normalizers.NFC()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[END, TURN], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT, CODE], trainer)
    tokenizer.add_tokens([AddedToken(THINK, normalized=False), AddedToken("    ", normalized=True)])
    if kind == "Llama 3":
        before = processors.TemplateProcessing(f"{END} $A", None, [(END, 0)])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), before])
    return tokenizer


def made_whole(texts: list[str]) -> Tokenizer:
    """One that merges whole texts, trained with `texts`, which puts a token before each text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    special = [END, TURN, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=["\n", "a"], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(THINK, normalized=False), AddedToken("\n\n", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(f"{END} $A", None, [(END, 0)])
    return tokenizer


def splitter(kind: str, words: str = "") -> Any:
    """What splits a text into words, by the expression `words` if it is given."""
    if kind == "GPT-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(Regex(words or WORDS[kind]), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
