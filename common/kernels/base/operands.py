"""Bundles of tensors that kernels take whole."""

from dataclasses import dataclass, fields

from torch import Tensor

HEAD_DIMS = (32, 64, 128, 256)
"""Sizes of a head that attention is made for."""
MAX_VOCAB = 1 << 20
"""Tokens whose probabilities, in fixed point, add up within int64."""
NO_CHOICE = -2
"""In place of the token of a row whose logits are all NaN or -inf, so that there is nothing to choose.

Such a row stays as it is, and the next step tries again.
"""
HEAD_WORDS = 4
"""Of `RowUpdates`: what is said of a row that is filled, cleared or moved."""
IN_PROMPT = 1 << 30
"""Added to the number of a token's outputs if the prompt has it."""
MAX_LOGPROBS = 20
"""Likeliest tokens of a row that are told with a chosen one."""
LOGPROB_WORDS = 1 + 2 * (MAX_LOGPROBS + 1)
"""Of a row: how many entries there are, their tokens, and as fp32 the logarithms of their probabilities."""
EDIT_FIELDS = 3
MAX_EDITS = 1088
"""Logits of a row that are biased, or banned for a while."""
MAX_WORDS = 256
"""Sequences of tokens that a row must not contain."""
WORD_TOKENS = 16
"""The most tokens of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """What attention needs besides its input."""

    q_norm: Tensor | None  # [head_dim], or None where the architecture has no query/key norm
    k_norm: Tensor | None  # [head_dim]
    norm_eps: float
    rope: Tensor  # [max_positions, head_dim] fp32: cos of the half angles, then sin of them
    num_q_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of a batch, one row a sequence; greedy rows have temperature 0.

    What the kernels read of the columns that `common.wire.values.sampling_params` declares, in the same order.
    """

    temperature: Tensor  # [num_rows] fp32
    top_k: Tensor  # [num_rows] int32; 0 is off
    top_p: Tensor  # [num_rows] fp32; 1 is off
    min_p: Tensor  # [num_rows] fp32; 0 is off
    seed: Tensor  # [num_rows] int64
    presence_penalty: Tensor  # [num_rows] fp32; 0 is off
    frequency_penalty: Tensor  # [num_rows] fp32; 0 is off
    repetition_penalty: Tensor  # [num_rows] fp32; 1 is off
    num_logprobs: Tensor  # [num_rows] int32; 0 is off, else for the chosen token and num_logprobs - 1 of the likeliest

    def columns(self) -> tuple[Tensor, ...]:
        """All of them, in order."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def rows(self, num_rows: int) -> "SamplingTensors":
        """Views of the first rows."""
        return SamplingTensors(*(column[:num_rows] for column in self.columns()))


@dataclass(frozen=True, slots=True)
class AdjustmentTensors:
    """What changes logits before a token is chosen, a slot a sequence that asks for it."""

    counts: Tensor  # [num_slots, vocab] int32: outputs of each token, and IN_PROMPT if the prompt has it
    masks: Tensor  # [num_slots, cdiv(vocab, 32)] int32: a bit a token, 1 for those that may be chosen
    edits: Tensor  # [num_slots, 3, MAX_EDITS] int32: token, fp32 value, end: -inf bans it before the position `end`
    num_edits: Tensor  # [num_slots] int32
    places: Tensor  # [num_slots] int32: of `GrammarMasks`; -1 under no grammar
    words: Tensor  # [num_slots, WORD_TOKENS, MAX_WORDS] int32: tokens of bad words, the last ones first; then -1
    num_words: Tensor  # [num_slots] int32
    recent: Tensor  # [num_slots, WORD_TOKENS] int32: of slots with words, the output at position % WORD_TOKENS, or -1

    def columns(self) -> tuple[Tensor, ...]:
        """All of them, in order."""
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """Memory of the host in which a decode step finds what grammars let follow: a place for each sequence under one.

    The host writes a mask, and then the position of the token that it is for, whenever it knows them, also while the
    step runs. A row whose mask is not there when the step wants it gets no token and stays as it is.
    """

    masks_cpu: Tensor  # [num_places, cdiv(vocab, 32)] int32, pinned where there is a GPU: a bit a token
    positions_cpu: Tensor  # [num_places] int32, the same
    are_late: Tensor  # [max_rows] int32, on the device: 1 for rows whose mask this step did not find


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Rows of a decode batch whose block tables are known to begin with the same blocks, a row a sequence.

    Rows of one number have the same `num_tokens`, fewer than each of them has keys.
    """

    numbers: Tensor  # [num_rows] int32: any, the same of rows with the same beginning; -1: none is known
    num_tokens: Tensor  # [num_rows] int32: in whole blocks; of rows with a number

    def rows(self, num_rows: int) -> "SharedPrefixes":
        """Views of the first rows."""
        return SharedPrefixes(self.numbers[:num_rows], self.num_tokens[:num_rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """What a decode batch keeps on the device, a row a sequence; a row with seq_len 0 is padding.

    All other tensors are views of `words`: first `token_ids`, `positions` and `seq_lens`, each `column_words` after the
    other.
    """

    words: Tensor  # [num_words] int32
    column_words: int
    token_ids: Tensor  # [max_rows] int32: the last token, its KV not written
    positions: Tensor  # [max_rows] int32: of that token
    seq_lens: Tensor  # [max_rows] int32: positions + 1; 0 for padding
    state_slots: Tensor  # [max_rows] int32: slot of `AdjustmentTensors`; -1 without one
    prefixes: SharedPrefixes  # each [max_rows]
    block_tables: Tensor  # [num_entries] int32: of all groups of KV blocks
    sampling: SamplingTensors  # each [max_rows]


@dataclass(frozen=True, slots=True)
class TokenRing:
    """Memory of the host in which decode steps leave their tokens, a row a sequence.

    The last kernel of a step stores each row's token into the slot whose turn it is, and moves the row's turn on.
    """

    tokens_cpu: Tensor  # [max_rows, num_slots] int32, pinned where there is a GPU
    turns: Tensor  # [max_rows] int32, on the device: the slot of the row's next token


@dataclass(frozen=True, slots=True)
class LogprobRing:
    """Memory of the host beside a `TokenRing`, in the same slots, for steps in which a row asks for it."""

    words_cpu: Tensor  # [max_rows, num_slots, LOGPROB_WORDS] int32, pinned where there is a GPU
    turns: Tensor  # [max_rows] int32, the token ring's


@dataclass(frozen=True, slots=True)
class RowUpdates:
    """Rows and words of `RowState.words` to be written, in one tensor, which the device reads where the host wrote it.

    Of each row: row, source, token, seq_len. Then `num_entries` places in `RowState.words`, then the words to be stored
    there, which are of none of the first three columns. The last token of a row is `token`, and its length `seq_len`,
    if `source` is -1; else what row `source` had before.
    """

    words: Tensor  # int32, at least [HEAD_WORDS * num_rows + 2 * num_entries], a buffer's, pinned where there is a GPU
    num_rows: int  # each written once
    num_entries: int  # places may be named twice, with the same word


@dataclass(frozen=True, slots=True)
class Division:
    """Who computes what of a decode step's attention, the same for all layers and KV heads (`decode_division`)."""

    items: Tensor  # [max_items, ITEM_WORDS] int32
    counts: Tensor  # [1 + num_layers] int32: items, and of each layer those drawn by programs beyond their first
    max_joins: int  # contexts that several items have parts of
    num_slots: int  # programs that run at once


@dataclass(frozen=True, slots=True)
class SharedDivision:
    """Who computes what of the keys that rows of a decode step begin with together (`shared_division`).

    Items with rows of one bundle of a group are units of these rows, one after the other.
    """

    own_begins: Tensor  # [num_rows] int32: the tile from which on each row attends alone; 0 where it shares nothing
    units: Tensor  # [num_rows] int32: the first item of each row that shares
    pieces: Tensor  # [num_rows] int32: how many of them there are
    places: Tensor  # [num_rows] int32: where the row stands in its bundle
    members: Tensor  # [num_rows] int32: rows that share, group after group
    items: Tensor  # [max_items, SHARED_ITEM_WORDS] int32
    num_items: Tensor  # [1] int32
    tokens: int  # rows of a bundle
    num_slots: int  # programs that run at once


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What the items of a `SharedDivision` come to; one is enough for all layers, which run one after another."""

    partial: Tensor  # [max_items, num_kv_heads, max_queries, head_dim] fp32: weighted sums of values
    maxima: Tensor  # [max_items, num_kv_heads, max_queries] fp32: of scores, in units of log2
    sums: Tensor  # the same shape: of weights
