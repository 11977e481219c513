"""Bundles of tensors around the choice of a token, and constants shared with the host."""

from dataclasses import dataclass, fields

from torch import Tensor

MAX_VOCAB = 1 << 20
"""Tokens; the fixed-point probabilities of more would overflow int64."""
NO_CHOICE = -2
"""Stands for the token of a row whose logits are all NaN or -inf.

The row stays as it is, and the next step tries again.
"""
IN_PROMPT = 1 << 30
"""Added to a token's number of outputs if the prompt contains the token."""
MAX_LOGPROBS = 20
"""Most likely tokens reported with a chosen token, at most."""
LOGPROB_WORDS = 1 + 2 * (MAX_LOGPROBS + 1)
"""int32 words of a row: number of entries, tokens, and log-probabilities as fp32 bits."""
EDIT_FIELDS = 3
MAX_EDITS = 1088
"""Logits of a row that are biased, or banned for a while, at most."""
MAX_WORDS = 256
"""Bad words of a row, at most."""
WORD_TOKENS = 16
"""Tokens of a bad word, at most."""


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of a batch, a row for each sequence; greedy rows have temperature 0.

    The fields are columns declared by `common.wire.values.sampling_params`, in the same order.
    """

    temperature: Tensor  # [num_rows] fp32
    top_k: Tensor  # [num_rows] int32; 0 is off
    top_p: Tensor  # [num_rows] fp32; 1 is off
    min_p: Tensor  # [num_rows] fp32; 0 is off
    seed: Tensor  # [num_rows] int64
    presence_penalty: Tensor  # [num_rows] fp32; 0 is off
    frequency_penalty: Tensor  # [num_rows] fp32; 0 is off
    repetition_penalty: Tensor  # [num_rows] fp32; 1 is off
    num_logprobs: Tensor  # [num_rows] int32; 0 is off, n reports the chosen token and n - 1 of the likeliest

    def columns(self) -> tuple[Tensor, ...]:
        """Return all fields, in order."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def rows(self, num_rows: int) -> "SamplingTensors":
        """Return views of the first rows."""
        return SamplingTensors(*(column[:num_rows] for column in self.columns()))


@dataclass(frozen=True, slots=True)
class AdjustmentTensors:
    """Changes to logits before a token is chosen, a slot for each sequence with changes."""

    counts: Tensor  # [num_slots, vocab] int32: outputs of each token, plus IN_PROMPT if the prompt contains the token
    masks: Tensor  # [num_slots, cdiv(vocab, 32)] int32: a bit for each token, 1 if allowed
    edits: Tensor  # [num_slots, 3, MAX_EDITS] int32: token, fp32 value, end: -inf bans the token before position `end`
    num_edits: Tensor  # [num_slots] int32
    places: Tensor  # [num_slots] int32: place in `GrammarMasks`; -1 without a grammar
    words: Tensor  # [num_slots, WORD_TOKENS, MAX_WORDS] int32: tokens of bad words, last token first; then -1
    num_words: Tensor  # [num_slots] int32
    recent: Tensor  # [num_slots, WORD_TOKENS] int32: output at position % WORD_TOKENS, or -1; only for slots with words

    def columns(self) -> tuple[Tensor, ...]:
        """Return all fields, in order."""
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """Host memory in which a decode step finds the masks of grammars, a place for each sequence with a grammar.

    The host writes a mask, then the position of the mask's token. It writes as soon as both are known, also while the
    step runs. A row whose mask is late gets no token and stays as it is.
    """

    masks_cpu: Tensor  # [num_places, cdiv(vocab, 32)] int32, pinned where there is a GPU: a bit for each token
    positions_cpu: Tensor  # [num_places] int32, pinned where there is a GPU: position of the mask's token
    are_late: Tensor  # [max_rows] int32, on the device: 1 for rows whose mask was late in the current step


@dataclass(frozen=True, slots=True)
class TokenRing:
    """Host memory in which decode steps leave their tokens, a row for each sequence.

    The last kernel of a step stores each row's token into the slot named by the row's turn, and moves the turn on.
    """

    tokens_cpu: Tensor  # [max_rows, num_slots] int32, pinned where there is a GPU
    turns: Tensor  # [max_rows] int32, on the device: the slot of the row's next token


@dataclass(frozen=True, slots=True)
class LogprobRing:
    """Host memory for log-probabilities beside a `TokenRing`, with the same slots; used by steps where a row asks."""

    words_cpu: Tensor  # [max_rows, num_slots, LOGPROB_WORDS] int32, pinned where there is a GPU
    turns: Tensor  # [max_rows] int32, shared with the token ring
