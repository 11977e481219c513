"""How the next token of one request is chosen; travels from the router to both workers.

`SamplingParams` is the one declaration of what a token is sampled by. Its annotations say what a field may hold
on the wire, and `PerRow` which fields a batch has on the device, a number a row: their staging, uploads, updates
and tensors follow from `SAMPLING_COLUMNS`. So a new parameter is a field here, a tensor that the kernel reads
(`SamplingTensors`, in the same order) and a field of the API.
"""

import typing
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from common.wire.values.fields import Count, Length, Packed, Positive, Range, Source
from common.wire.values.output_token import MAX_LOGPROBS

MAX_STOP_TOKENS = 64
MAX_BIASED = 1024
MAX_ALLOWED = 1 << 20
MAX_GRAMMAR_CHARS = 1 << 17
"""Of a grammar as llguidance has it; a client's is shorter (`router.requests.structured_fields`)."""
MAX_BAD_WORDS = 256
MAX_WORD_TOKENS = 16


@dataclass(frozen=True, slots=True)
class PerRow:
    """A batch holds this field on the device, as a number a row of that type."""

    dtype: Literal["float32", "int32", "int64"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated by the router before it is sent.

    Before a token is chosen logits are changed by biases, by bans (of stop tokens until there are `min_tokens` outputs,
    of what is not allowed, of what would complete a bad word), then by penalties, as in
    `common.ops.reference.adjust_logits`.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. Filters apply in the order
    temperature, top-k, top-p, min-p. Random numbers are keyed on (seed, position of the token in
    the whole sequence), so a request gives the same text in any batch and after a replay.
    """

    max_tokens: Positive = 16
    temperature: Annotated[float, Range(0.0, 100.0), PerRow("float32")] = 1.0
    top_k: Annotated[Count, PerRow("int32")] = 0
    top_p: Annotated[float, Range(0.0, 1.0), PerRow("float32")] = 1.0
    min_p: Annotated[float, Range(0.0, 1.0), PerRow("float32")] = 0.0
    seed: Annotated[int, Range(0, (1 << 63) - 1), PerRow("int64")] = 0  # the router draws one when there is none
    stop_token_ids: Annotated[tuple[Count, ...], Length(0, MAX_STOP_TOKENS)] = ()  # empty under ignore_eos
    presence_penalty: Annotated[float, Range(-2.0, 2.0), PerRow("float32")] = 0.0
    frequency_penalty: Annotated[float, Range(-2.0, 2.0), PerRow("float32")] = 0.0
    repetition_penalty: Annotated[float, Range(0.001, 1000.0), PerRow("float32")] = 1.0
    min_tokens: Count = 0
    num_logprobs: Annotated[int, Range(0, MAX_LOGPROBS + 1), PerRow("int32")] = 0  # of the chosen one and the likeliest
    biased_token_ids: Annotated[tuple[Count, ...], Length(0, MAX_BIASED)] = ()  # each once
    biases: Annotated[tuple[Annotated[float, Range(-100.0, 100.0)], ...], Length(0, MAX_BIASED)] = ()  # one for each
    allowed_token_ids: Annotated[bytes, Packed(0, MAX_ALLOWED)] = b""  # all, if empty
    grammar: Annotated[str, Source(MAX_GRAMMAR_CHARS)] = ""  # of the text, as `common.grammar` reads it; "" for none
    bad_words: Annotated[tuple[Annotated[bytes, Packed(1, MAX_WORD_TOKENS)], ...], Length(0, MAX_BAD_WORDS)] = ()

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits are changed before a token is chosen, so that the sequence needs a slot on the device."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        bans_stops = self.min_tokens > 0 and bool(self.stop_token_ids)
        lists = self.biased_token_ids or self.allowed_token_ids or self.bad_words or self.grammar
        return penalties != (0.0, 0.0, 1.0) or bans_stops or bool(lists)


class SamplingColumn(NamedTuple):
    """A field of `SamplingParams` on the device."""

    name: str
    dtype: str  # as numpy and torch name it

    def values(self, params: typing.Iterable[SamplingParams]) -> list[float]:
        """The field of each."""
        return [getattr(each, self.name) for each in params]


def _columns() -> tuple[SamplingColumn, ...]:
    hints = typing.get_type_hints(SamplingParams, include_extras=True)
    marks = [(name, mark) for name, hint in hints.items() for mark in typing.get_args(hint)[1:]]
    return tuple(SamplingColumn(name, mark.dtype) for name, mark in marks if isinstance(mark, PerRow))


SAMPLING_COLUMNS = _columns()
"""Every field that is held by row, in the order of the fields."""
PADDING = SamplingParams(temperature=0.0)
"""What a row that no sequence is in is sampled by: the least work."""
