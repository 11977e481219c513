"""Sampling parameters of a request, sent by the router to both workers.

`SamplingParams` is the only declaration of the parameters. Annotations limit the values of fields on the wire. `PerRow`
marks the fields held by a batch on the device, a number a row: staging, uploads, updates and tensors follow from
`SAMPLING_COLUMNS`. So a new parameter needs a field here, a tensor for the kernel (`SamplingTensors`, in equal order)
and a field of the API.
"""

import typing
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from common.wire.values.fields import MAX_INT64, Count, Packed, PackedLists, Positive, WireStruct
from common.wire.values.output_token import MAX_LOGPROBS
from common.wire.values.packing import ID_BYTES

MAX_STOP_TOKENS = 64
MAX_BIASED = 1024
MAX_ALLOWED = 1 << 20
MAX_GRAMMAR_CHARS = 1 << 17
"""Most characters in llguidance's form; a client's limit is lower (`router.requests.structured_fields`)."""
MAX_BAD_WORDS = 256
MAX_WORD_TOKENS = 16

Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Word = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=MAX_WORD_TOKENS * ID_BYTES)]


@dataclass(frozen=True, slots=True)
class PerRow:
    """Mark of a field held by a batch on the device, as a number of `dtype` a row."""

    dtype: Literal["float32", "int32", "int64"]


class SamplingParams(WireStruct):
    """Sampling parameters of a request, validated by the router before sending.

    Logits are adjusted before sampling: first biases, then bans, then penalties (`common.ops.reference.adjust_logits`).
    Bans cover stop tokens before `min_tokens` outputs, tokens that are not allowed, and the last token of a bad word.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. Filters apply in the order temperature, top-k, top-p,
    min-p. Random numbers are keyed on (seed, position of the token in the whole sequence). So a request gives equal
    text in any batch and after a replay.
    """

    max_tokens: Positive = 16
    temperature: Annotated[float, Meta(ge=0.0, le=100.0), PerRow("float32")] = 1.0
    top_k: Annotated[Count, PerRow("int32")] = 0
    top_p: Annotated[float, Meta(ge=0.0, le=1.0), PerRow("float32")] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0), PerRow("float32")] = 0.0
    seed: Annotated[int, Meta(ge=0, le=MAX_INT64), PerRow("int64")] = 0  # drawn by the router if the client gives none
    stop_token_ids: Annotated[tuple[Count, ...], Meta(max_length=MAX_STOP_TOKENS)] = ()  # empty under ignore_eos
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0), PerRow("float32")] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0), PerRow("float32")] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.001, le=1000.0), PerRow("float32")] = 1.0
    min_tokens: Count = 0
    num_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS + 1), PerRow("int32")] = 0  # chosen token included
    biased_token_ids: Annotated[tuple[Count, ...], Meta(max_length=MAX_BIASED)] = ()  # no duplicates
    biases: Annotated[tuple[Bias, ...], Meta(max_length=MAX_BIASED)] = ()  # by biased token
    allowed_token_ids: Annotated[bytes, Meta(max_length=MAX_ALLOWED * ID_BYTES), Packed()] = b""  # empty: all tokens
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)] = ""  # llguidance's form; "" for none
    bad_words: Annotated[tuple[Word, ...], Meta(max_length=MAX_BAD_WORDS), PackedLists()] = ()

    def problem(self, num_tokens: int, num_outputs: int) -> str:
        """Require a prompt before the outputs among `num_tokens`, an output still to come, and a bias for each token.

        No token has two biases, because kernels add biases in parallel.
        """
        if num_outputs >= min(num_tokens, self.max_tokens):
            return f"{num_outputs} outputs among {num_tokens} tokens, at most {self.max_tokens} wanted"
        num_biased, num_biases = len(self.biased_token_ids), len(self.biases)
        if num_biased == num_biases == len(set(self.biased_token_ids)):
            return ""
        return f"{num_biases} biases of {num_biased} tokens, each once"

    @property
    def adjusts_logits(self) -> bool:
        """Tell whether logits are adjusted before sampling, so the sequence needs a slot on the device."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        bans_stops = self.min_tokens > 0 and bool(self.stop_token_ids)
        lists = self.biased_token_ids or self.allowed_token_ids or self.bad_words or self.grammar
        return penalties != (0.0, 0.0, 1.0) or bans_stops or bool(lists)


class SamplingColumn(NamedTuple):
    """A field of `SamplingParams` on the device."""

    name: str
    dtype: str  # name in numpy and torch

    def values(self, params: typing.Iterable[SamplingParams]) -> list[float]:
        """Return the field of each request."""
        return [getattr(each, self.name) for each in params]


def _columns() -> tuple[SamplingColumn, ...]:
    hints = typing.get_type_hints(SamplingParams, include_extras=True)
    marks = [(name, mark) for name, hint in hints.items() for mark in typing.get_args(hint)[1:]]
    return tuple(SamplingColumn(name, mark.dtype) for name, mark in marks if isinstance(mark, PerRow))


SAMPLING_COLUMNS = _columns()
"""Fields with a number a row, in declaration order."""
PADDING = SamplingParams(temperature=0.0)
"""Parameters of a row without a sequence: the least work."""
