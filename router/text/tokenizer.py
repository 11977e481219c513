"""What the router knows of the model: its tokenizer, its end-of-text tokens and its limits.

Read from the model directory without torch or transformers.
"""

import os
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

from common.base.errors import ConfigError
from common.base.json_file import read_json
from common.base.malloc import trim_memory
from common.grammar.end_tokens import end_token_ids
from common.settings.config import MAX_TOKENS, ModelSection
from common.wire.values.fingerprint import model_fingerprint, tokenizer_fingerprint
from router.base.json_rules import wrong
from router.text.chat_template import load_chat_template
from router.text.control_tokens import ControlTokens
from router.text.model_info import ModelInfo
from router.text.prompts import MAX_CHARS_PER_TOKEN, Encoding, Prompt, TokenIds, too_long
from router.text.text_cache import TextCache, TextCounts
from router.text.text_cuts import Cuts, cuts_of

USUAL_CHARS_PER_TOKEN = 4
"""A text that fits only with more than this is counted before it is encoded."""
PIECE_CHARS = 16_384
MAX_BATCH = 32
"""Pieces of a text that are encoded at once."""


AS_IT_IS = Encoding()


def encode_in_one_thread() -> None:
    """Have the library start none for each processor; streams want these, too."""
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # the library reads it when it encodes


def load_tokenizer(section: ModelSection, text_cache_bytes: int) -> "Tokenizer":
    """A `Tokenizer`, made in a thread of its own; raises what that does.

    So it lies in that thread's arena, with the room that loading it has left: in the heap of the main thread large
    bodies would lie there, and what they take would not go back to the system when they do.
    """
    with ThreadPoolExecutor(1) as thread:
        tokenizer = thread.submit(Tokenizer, section, text_cache_bytes).result()
    trim_memory()  # half of what loading it took
    return tokenizer


class Tokenizer:
    """Text to ids and back."""

    def __init__(self, section: ModelSection, text_cache_bytes: int = 0) -> None:
        """Raises ConfigError, naming the file and the remedy, for a directory that cannot be served."""
        path = Path(section.path)
        fingerprint = tokenizer_fingerprint(path)
        config = read_json(path / "config.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception for a file it cannot read
            raise ConfigError(
                f"{path / 'tokenizer.json'}: {error}; fetch the model's own tokenizer.json again"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.chat_template = load_chat_template(path)
        special = {i: token.content for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self.control_tokens = ControlTokens(special.values())
        self._special_ids = frozenset(special)
        self._cuts = cuts_of(self._tokenizer)
        self._texts = TextCache(text_cache_bytes)
        self.info = ModelInfo(
            name=section.served_name,
            model_fingerprint=model_fingerprint(path),
            tokenizer_fingerprint=fingerprint,
            vocab_size=_count(config, "vocab_size", path),
            max_model_len=_max_model_len(section, config, path),
            eos_token_ids=end_token_ids(path),
        )

    @property
    def cuts_texts(self) -> bool:
        """Whether it is known where texts may be cut, without which none is found again."""
        return self._cuts is not None

    @property
    def text_counts(self) -> TextCounts:
        """Of all texts that became prompts, since the start."""
        return self._texts.counts

    def encode(self, prompts: Sequence[Prompt], max_model_len: int, encoding: Encoding = AS_IT_IS) -> list[TokenIds]:
        """Ids of each.

        Raises RequestError for a prompt that is surely too long, before it takes time and memory. Frees the interpreter
        lock while it works: `encode_batch_fast` does for almost all of its time, `encode` does not.
        """
        kept = [prompt if isinstance(prompt, str) else encoding.cut(prompt) for prompt in prompts]
        for prompt in kept:
            if not isinstance(prompt, str) and len(prompt) >= max_model_len:
                raise too_long(f"{len(prompt)} tokens", max_model_len)
        return [self._encode(prompt, max_model_len, encoding) if isinstance(prompt, str) else prompt for prompt in kept]

    def encode_inside(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of short texts, each as it stands within a longer one."""
        return [encoded.ids for encoded in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; ids without text give none."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def decode_all(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def decode_prompt(self, ids: Sequence[int]) -> str:
        """`decode_all`, of many ids: frees the interpreter lock while it works."""
        (text,) = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=False)
        return str(text)

    def strings(self, ids: Sequence[int]) -> list[str | None]:
        """Each token as the vocabulary writes it; None for ids that the model has and the vocabulary does not."""
        return [self._tokenizer.id_to_token(token_id) for token_id in ids]

    def _encode(self, text: str, max_model_len: int, encoding: Encoding) -> TokenIds:
        if encoding.max_tokens is None:
            self._check_length(text.replace(encoding.mark, "") if encoding.mark else text, max_model_len)
            if self._cuts is not None and not encoding.mark:
                return self._encode_pieces(self._cuts, text, encoding)
        ids = self._encode_whole(text, encoding)
        self._texts.count(TextCounts(num_encoded=len(ids)))
        return ids

    def _encode_pieces(self, cuts: Cuts, text: str, encoding: Encoding) -> TokenIds:
        """Those that were encoded before are not encoded again."""
        ids = self._texts.ids(cuts.pieces(text), encoding.salt, self._encode_each)
        return cuts.before + ids + cuts.after if encoding.add_special_tokens else ids

    def _encode_each(self, pieces: list[str]) -> list[TokenIds]:
        """A few at a time: the library takes up to 500 bytes for a character while it works."""
        batches = (pieces[begin : begin + MAX_BATCH] for begin in range(0, len(pieces), MAX_BATCH))
        encode = partial(self._tokenizer.encode_batch_fast, add_special_tokens=False)
        return [array("i", each.ids) for batch in batches for each in encode(batch)]

    def _encode_whole(self, text: str, encoding: Encoding) -> TokenIds:
        if encoding.max_tokens is not None:
            return self._encode_part(text, encoding.max_tokens, encoding)
        if encoding.mark:
            return self._completed(self._encode_marked(text, encoding.mark), encoding)
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=encoding.add_special_tokens)
        return array("i", encoded.ids)

    def _check_length(self, text: str, max_model_len: int) -> None:
        if len(text) > MAX_CHARS_PER_TOKEN * max_model_len:
            raise too_long(f"{len(text)} characters, more than {MAX_CHARS_PER_TOKEN} a token", max_model_len)
        if len(text) > USUAL_CHARS_PER_TOKEN * max_model_len and self._has_more_tokens(text, max_model_len):
            raise too_long(f"more than {max_model_len} tokens", max_model_len)

    def _encode_part(self, text: str, max_tokens: int, encoding: Encoding) -> TokenIds:
        """Of an end of the text that is long enough; the tokens that the model puts around a text are all there."""
        num_special = self._tokenizer.num_special_tokens_to_add(False) if encoding.add_special_tokens else 0
        if max_tokens <= num_special:
            raise wrong("truncate_prompt_tokens", max_tokens, f"more than the {num_special} tokens put around a text")
        if encoding.mark:  # no longer than a template may write
            return self._completed(self._encode_marked(text, encoding.mark), encoding, max_tokens - num_special)
        num_chars = MAX_CHARS_PER_TOKEN * max_tokens
        part = text[-num_chars:] if encoding.keep_end else text[:num_chars]
        if self._cuts is not None:
            return self._encode_end(self._cuts, part, max_tokens - num_special, encoding)
        (encoded,) = self._tokenizer.encode_batch_fast([part], add_special_tokens=False)
        return self._completed(encoded, encoding, max_tokens - num_special)

    def _encode_end(self, cuts: Cuts, text: str, num_tokens: int, encoding: Encoding) -> TokenIds:
        """So many tokens, or all, encoded from the end that is kept, until there are enough."""
        pieces, ids = cuts.pieces(text), array("i")
        while pieces and len(ids) < num_tokens:
            if encoding.keep_end:
                pieces, batch = pieces[:-MAX_BATCH], pieces[-MAX_BATCH:]
                ids = sum(self._encode_each(batch), array("i")) + ids
            else:
                pieces, batch = pieces[MAX_BATCH:], pieces[:MAX_BATCH]
                ids = sum(self._encode_each(batch), ids)
        ids = ids[-num_tokens:] if encoding.keep_end else ids[:num_tokens]
        return cuts.before + ids + cuts.after if encoding.add_special_tokens else ids

    def _completed(self, encoded: tokenizers.Encoding, encoding: Encoding, num_tokens: int | None = None) -> TokenIds:
        """With the tokens that the model puts around a text; before, so many of its own are kept, if not all."""
        if num_tokens is not None:
            encoded.truncate(num_tokens, direction="left" if encoding.keep_end else "right")
        whole = self._tokenizer.post_process(encoded, add_special_tokens=encoding.add_special_tokens)
        return array("i", whole.ids)

    def _encode_marked(self, text: str, mark: str) -> tokenizers.Encoding:
        """What is between special tokens is encoded as if there were none; never call it in two threads at once."""
        (found,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        places = [place for i, place in zip(found.ids, found.offsets, strict=True) if i in self._special_ids]
        ends = [0, *(end for _, end in places)]
        begins = [*(begin for begin, _ in places), len(text)]
        between = [text[end:begin].replace(mark, "") for end, begin in zip(ends, begins, strict=True)]
        special = self._tokenizer.encode_batch([text[begin:end] for begin, end in places], add_special_tokens=False)
        self._tokenizer.encode_special_tokens = True  # as text
        try:
            first, *others = self._tokenizer.encode_batch(between, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = False
        in_order = [first, *(part for pair in zip(special, others, strict=True) for part in pair)]
        return tokenizers.Encoding.merge(in_order)

    def _has_more_tokens(self, text: str, limit: int) -> bool:
        """Whether `text` surely has, counted piece by piece until it does: a cut adds few tokens, if any."""
        num_tokens, limit = 0, limit + limit // 8
        for start in range(0, len(text), PIECE_CHARS):
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text[start : start + PIECE_CHARS]], add_special_tokens=False
            )
            num_tokens += len(encoding)
            if num_tokens > limit:
                return True
        return False


def _max_model_len(section: ModelSection, config: dict[str, Any], path: Path) -> int:
    limit = _count(config, "max_position_embeddings", path)
    if section.max_len > limit:
        raise ConfigError(f"model.max_len = {section.max_len}: the model's own limit is {limit}")
    return section.max_len or limit


def _count(config: dict[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise ConfigError(f"{path / 'config.json'}: {key} = {value!r:.80}: wants a whole number of 1 to {MAX_TOKENS}")
    return value
