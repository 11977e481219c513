"""The model as seen by the router: tokenizer, end tokens and limits.

All data comes from the model directory or the GGUF file, without torch or transformers.
"""

import logging
import os
from array import array
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import tokenizers
from tokenizers import processors

from common.base.errors import ConfigError, RequestError
from common.base.json_file import JsonObject
from common.base.process import trim_memory
from common.base.rotary import num_positions
from common.checkpoint.files import CONFIG, TOKENIZER, ModelFiles, open_model, text_config
from common.grammar.end_tokens import end_token_ids
from common.settings.config import MAX_TOKENS, ModelSection
from common.wire.values.fingerprint import (
    chosen_fingerprint,
    files_described,
    model_fingerprint,
    tokenizer_fingerprint,
)
from router.base.json_rules import wrong
from router.text.chat_template import ChatTemplate, load_chat_template, special_tokens_of
from router.text.control_tokens import ControlTokens
from router.text.detokenizer import Decode, Piece, pieces_of
from router.text.formats.registry import FORMATS
from router.text.model_info import ModelInfo
from router.text.prompts import MAX_CHARS_PER_TOKEN, Encoding, Prompt, TokenIds, highest, too_long
from router.text.text_cache import TextCache, TextCounts
from router.text.text_cuts import Cuts, cuts_of

logger = logging.getLogger(__name__)

USUAL_CHARS_PER_TOKEN = 4
"""A text with more characters per token is counted before encoding."""
PIECE_CHARS = 16_384
MAX_BATCH = 32
"""Pieces of a text encoded at once."""


AS_IT_IS = Encoding()


def encode_in_one_thread() -> None:
    """Keep the tokenizers library from starting a thread per processor, because streams need processors too."""
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # read by the library at each encoding


def load_tokenizer(section: ModelSection, text_cache_bytes: int) -> "Tokenizer":
    """Make a `Tokenizer` in a separate thread, and raise the errors of its constructor.

    The tokenizer and the free memory left by loading then lie in the thread's arena. In the main thread's heap, large
    bodies would fill the free memory, and would not return to the system.
    """
    with ThreadPoolExecutor(1) as thread:
        tokenizer = thread.submit(Tokenizer, section, text_cache_bytes).result()
    trim_memory()  # frees half of the memory used for loading
    return tokenizer


class TextEncoder:
    """Encoder of texts: cached, piece by piece, or cut to the kept end."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, special_ids: frozenset[int], text_cache_bytes: int) -> None:
        self._tokenizer, self._special_ids = tokenizer, special_ids
        self.cuts = cuts_of(tokenizer)
        self.texts = TextCache(text_cache_bytes)
        self._begin = _text_begin(tokenizer)

    def encode(self, text: str, max_model_len: int, encoding: Encoding) -> TokenIds:
        """Return the ids of a text; raises RequestError if surely too long.

        A token put before each text is not repeated if the text itself begins with the token.
        """
        if encoding.add_special_tokens:
            text = text.removeprefix(self._begin)
        if encoding.max_tokens is None:
            self._check_length(text.replace(encoding.mark, "") if encoding.mark else text, max_model_len)
            if self.cuts is not None and not encoding.mark:
                return self._encode_pieces(self.cuts, text, encoding)
        ids = self._encode_whole(text, encoding)
        self.texts.count(TextCounts(num_encoded=len(ids)))
        return ids

    def _encode_pieces(self, cuts: Cuts, text: str, encoding: Encoding) -> TokenIds:
        """Encode a text by pieces, each taken from the cache if known."""
        ids = self.texts.ids(cuts.pieces(text), encoding.salt, self._encode_each)
        return cuts.before + ids + cuts.after if encoding.add_special_tokens else ids

    def _encode_each(self, pieces: list[str]) -> list[TokenIds]:
        """Encode pieces in small batches, because the library takes up to 500 bytes per character meanwhile."""
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
        """Encode as much of the kept end as gives `max_tokens` tokens, including the special tokens around a text."""
        num_special = self._tokenizer.num_special_tokens_to_add(False) if encoding.add_special_tokens else 0
        if max_tokens <= num_special:
            raise wrong("truncate_prompt_tokens", max_tokens, f"more than the {num_special} tokens put around a text")
        if encoding.mark:  # rendered chats have a bounded length
            return self._completed(self._encode_marked(text, encoding.mark), encoding, max_tokens - num_special)
        num_chars = MAX_CHARS_PER_TOKEN * max_tokens
        part = text[-num_chars:] if encoding.keep_end else text[:num_chars]
        if self.cuts is not None:
            return self._encode_end(self.cuts, part, max_tokens - num_special, encoding)
        (encoded,) = self._tokenizer.encode_batch_fast([part], add_special_tokens=False)
        return self._completed(encoded, encoding, max_tokens - num_special)

    def _encode_end(self, cuts: Cuts, text: str, num_tokens: int, encoding: Encoding) -> TokenIds:
        """Return at most `num_tokens`, encoded batch by batch from the kept end."""
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
        """Add the special tokens around a text, after cutting the text to `num_tokens` if given."""
        if num_tokens is not None:
            encoded.truncate(num_tokens, direction="left" if encoding.keep_end else "right")
        whole = self._tokenizer.post_process(encoded, add_special_tokens=encoding.add_special_tokens)
        return array("i", whole.ids)

    def _encode_marked(self, text: str, mark: str) -> tokenizers.Encoding:
        """Encode text between special tokens as plain text; never call in two threads at once."""
        (found,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        places = [place for i, place in zip(found.ids, found.offsets, strict=True) if i in self._special_ids]
        ends = [0, *(end for _, end in places)]
        begins = [*(begin for begin, _ in places), len(text)]
        between = [text[end:begin].replace(mark, "") for end, begin in zip(ends, begins, strict=True)]
        special = self._tokenizer.encode_batch([text[begin:end] for begin, end in places], add_special_tokens=False)
        self._tokenizer.encode_special_tokens = True  # encode their text as plain text
        try:
            first, *others = self._tokenizer.encode_batch(between, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = False
        in_order = [first, *(part for pair in zip(special, others, strict=True) for part in pair)]
        return tokenizers.Encoding.merge(in_order)

    def _has_more_tokens(self, text: str, limit: int) -> bool:
        """Tell whether `text` surely exceeds `limit`, counted by pieces; the margin allows for tokens added by cuts."""
        num_tokens, limit = 0, limit + limit // 8
        for start in range(0, len(text), PIECE_CHARS):
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text[start : start + PIECE_CHARS]], add_special_tokens=False
            )
            num_tokens += len(encoding)
            if num_tokens > limit:
                return True
        return False


class Tokenizer:
    """Conversion of text to token ids and back.

    Attributes:
        decode: returns the text of ids without special tokens; ids without text give none.
        decode_all: returns the text of ids, special tokens included.
    """

    def __init__(self, section: ModelSection, text_cache_bytes: int = 0) -> None:
        """Load the text side of a model; raises ConfigError with the file and the remedy if unusable."""
        path = Path(section.path)
        fingerprint = tokenizer_fingerprint(path)
        files = open_model(path)
        config, content, where = text_config(files), files.tokenizer(), files.where(CONFIG)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception for a text it cannot read
            raise ConfigError(f"{files.where(TOKENIZER)}: {error}; fetch the model's own {TOKENIZER} again") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.decode: Decode = partial(self._tokenizer.decode, skip_special_tokens=True)
        self.decode_all: Decode = partial(self._tokenizer.decode, skip_special_tokens=False)
        self.chat_template = load_chat_template(files)
        _add_begin(self._tokenizer, files, self.chat_template)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {i: token.content for i, token in added.items() if token.special}
        self._special = special
        self._decoders: dict[frozenset[str], Decode] = {}  # by kept texts, of which formats have few
        self._pieces: dict[Decode, Piece] = {}
        self.control_tokens = ControlTokens(special.values())
        self._encoder = TextEncoder(self._tokenizer, frozenset(special), text_cache_bytes)
        self.info = ModelInfo(
            name=section.served_name,
            model_fingerprint=chosen_fingerprint(model_fingerprint(path), section.quantization, section.head),
            tokenizer_fingerprint=fingerprint,
            vocab_size=_count(config, "vocab_size", where),
            max_model_len=_max_model_len(section, config, where),
            eos_token_ids=_end_ids(files, special, self.chat_template),
            files=files_described(path),
        )
        highest_id = max(self._tokenizer.get_vocab_size() - 1, *added, 0)
        self._has_more_tokens = highest_id >= self.info.vocab_size  # than the model

    @property
    def cuts_texts(self) -> bool:
        """True if safe cuts are known; otherwise no text is cached."""
        return self._encoder.cuts is not None

    @property
    def text_counts(self) -> TextCounts:
        """Tokens of all texts turned into prompts since the start."""
        return self._encoder.texts.counts

    def encode(self, prompts: Sequence[Prompt], max_model_len: int, encoding: Encoding = AS_IT_IS) -> list[TokenIds]:
        """Return the ids of each prompt.

        Raises RequestError for a prompt surely too long, before spending time and memory, and for a text with a token
        that the model lacks. Releases the interpreter lock: `encode_batch_fast` does so for most of its time, `encode`
        does not.
        """
        kept = [prompt if isinstance(prompt, str) else encoding.cut(prompt) for prompt in prompts]
        for prompt in kept:
            if not isinstance(prompt, str) and len(prompt) >= max_model_len:
                raise too_long(f"{len(prompt)} tokens", max_model_len)
        return [
            self._encode_text(prompt, max_model_len, encoding) if isinstance(prompt, str) else prompt for prompt in kept
        ]

    def _encode_text(self, text: str, max_model_len: int, encoding: Encoding) -> TokenIds:
        ids = self._encoder.encode(text, max_model_len, encoding)
        if self._has_more_tokens and ids and (most := highest(ids)) >= self.info.vocab_size:
            raise RequestError(
                f"the prompt has {self._tokenizer.id_to_token(most)!r}, token {most} of the tokenizer; "
                f"the model has tokens 0 to {self.info.vocab_size - 1}: leave it out",
                param="prompt",
                code="invalid_value",
            )
        return ids

    def encode_inside(self, texts: Sequence[str]) -> list[list[int]]:
        """Return ids of short texts, each encoded as a part of a longer text."""
        return [encoded.ids for encoded in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode_prompt(self, ids: Sequence[int]) -> str:
        """Return `decode_all` of many ids, without holding the interpreter lock."""
        (text,) = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=False)
        return str(text)

    def decode_with(self, kept: Collection[str]) -> Decode:
        """Return a function like `decode`, but for special tokens that are texts in `kept`, or parts of them."""
        known = frozenset(kept)
        if known not in self._decoders:
            self._decoders[known] = self._made_decoder(known)
        return self._decoders[known]

    def _made_decoder(self, kept: frozenset[str]) -> Decode:
        hidden = frozenset(i for i, text in self._special.items() if not any(text in each for each in kept))
        if len(hidden) == len(self._special):
            return self.decode
        decode = self.decode_all
        return lambda ids: decode([token_id for token_id in ids if token_id not in hidden])

    def pieces_of(self, decode: Decode) -> Piece:
        """Return the pieces of a decoding function of this tokenizer, remembered by all texts."""
        if decode not in self._pieces:
            self._pieces[decode] = pieces_of(self._tokenizer, decode)
        return self._pieces[decode]

    def strings(self, ids: Sequence[int]) -> list[str | None]:
        """Return each token as written in the vocabulary; None for ids of the model beyond the vocabulary."""
        return [self._tokenizer.id_to_token(token_id) for token_id in ids]


def _text_begin(tokenizer: tokenizers.Tokenizer) -> str:
    """Return the text of the token that the tokenizer puts before each text, "" if it puts none."""
    (encoded,) = tokenizer.encode_batch(["a"], add_special_tokens=True)
    is_first = bool(encoded.special_tokens_mask) and encoded.special_tokens_mask[0] == 1
    return str(tokenizer.id_to_token(encoded.ids[0])) if is_first else ""


def _add_begin(tokenizer: tokenizers.Tokenizer, files: ModelFiles, template: ChatTemplate | None) -> None:
    """Have the tokenizer put the model's first token (BOS) before each text, if the model wants it there.

    Some models name the token only in tokenizer_config.json, or only write it in chats. Where a configuration says
    whether texts begin with the token, chats do not matter.
    """
    config = files.tokenizer_config()
    begin = special_tokens_of(config).get("bos_token", "")
    told = config.get("add_bos_token")
    is_wanted = told if isinstance(told, bool) else template is not None and template.writes_begin
    token_id = tokenizer.token_to_id(begin) if begin and is_wanted else None
    if token_id is None or _text_begin(tokenizer) == begin:
        return
    before = processors.TemplateProcessing(f"{begin} $A", None, [(begin, token_id)])
    after = tokenizer.post_processor
    tokenizer.post_processor = before if after is None else processors.Sequence([after, before])
    logger.info("%s is put before each text, as this model's configuration or chat template says", begin)


def _end_ids(files: ModelFiles, special: Mapping[int, str], template: ChatTemplate | None) -> tuple[int, ...]:
    """Return the model's end tokens, and those that end its calls."""
    stops = FORMATS[template.tool_format].stops if template is not None else ()
    return tuple(dict.fromkeys((*end_token_ids(files), *(i for i, text in special.items() if text in stops))))


def _max_model_len(section: ModelSection, config: JsonObject, where: Path) -> int:
    try:
        limit = num_positions(config, MAX_TOKENS)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    if section.max_len > limit:
        raise ConfigError(f"model.max_len = {section.max_len}: the model's own limit is {limit}")
    return section.max_len or limit


def _count(config: JsonObject, key: str, where: Path) -> int:
    value = config.get(key)
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise ConfigError(f"{where}: {key} = {value!r:.80}: wants a whole number of 1 to {MAX_TOKENS}")
    return value
