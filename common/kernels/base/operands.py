"""Bundles of tensors that kernels take whole, and constants shared with the host."""

from dataclasses import dataclass, fields

from torch import Tensor

HEAD_DIMS = (32, 64, 128, 256)
"""Head sizes supported by attention kernels."""
MAX_VOCAB = 1 << 20
"""Tokens; the fixed-point probabilities of more would overflow int64."""
NO_CHOICE = -2
"""Stands for the token of a row whose logits are all NaN or -inf.

The row stays as it is, and the next step tries again.
"""
HEAD_WORDS = 4
"""int32 words of `RowUpdates` for a row that is filled, cleared or moved."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """Inputs of attention besides Q, K and V."""

    q_norm: Tensor | None  # [head_dim], or None where the architecture has no query/key norm
    k_norm: Tensor | None  # [head_dim]
    norm_eps: float
    rope: Tensor  # [max_positions, head_dim] fp32: cos of the half angles, then sin of them
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    group: int = 0  # of KV blocks, with the layer's cache


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
class SharedPrefixes:
    """Rows of a decode batch whose block tables begin with the same blocks, a row for each sequence.

    Rows with equal numbers have equal `num_tokens`, fewer than any of these rows has keys.
    """

    numbers: Tensor  # [num_rows] int32: equal for rows with the same beginning; -1: no shared beginning is known
    num_tokens: Tensor  # [num_rows] int32: a multiple of the block size; meaningful for rows with a number

    def rows(self, num_rows: int) -> "SharedPrefixes":
        """Return views of the first rows."""
        return SharedPrefixes(self.numbers[:num_rows], self.num_tokens[:num_rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """State of a decode batch on the device, a row for each sequence; a row with seq_len 0 is padding.

    All other tensors are views of `words`. `token_ids`, `positions` and `seq_lens` come first, each `column_words`
    behind the one before.
    """

    words: Tensor  # [num_words] int32
    column_words: int
    token_ids: Tensor  # int32 words from each of the first three columns to the next
    positions: Tensor  # [max_rows] int32: the last token, whose KV is not written yet
    seq_lens: Tensor  # [max_rows] int32: position of the last token
    state_slots: Tensor  # [max_rows] int32: slot of `AdjustmentTensors`; -1 without one
    prefixes: SharedPrefixes  # each [max_rows]
    block_tables: Tensor  # [num_entries] int32: block tables of all groups of KV blocks
    sampling: SamplingTensors  # each [max_rows]


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


@dataclass(frozen=True, slots=True)
class RowUpdates:
    """Rows and words of `RowState.words` to write, in a tensor read by the device where the host wrote it.

    First come four words of each row: row, source, token, seq_len. Then come `num_entries` places in `RowState.words`,
    and then the words to store there; no place is in the first three columns. With `source` -1, the row's last token
    becomes `token` and the length `seq_len`. Otherwise both are copied from row `source`, as before the update.
    """

    words: Tensor  # int32, at least [HEAD_WORDS * num_rows + 2 * num_entries], of a buffer, pinned where there is a GPU
    num_rows: int  # rows, each written once
    num_entries: int  # entries; a place may occur twice, with equal words


@dataclass(frozen=True, slots=True)
class Division:
    """Division of a decode step's attention into items; holds for all layers and KV heads (`decode_division`)."""

    items: Tensor  # [max_items, ITEM_WORDS] int32
    counts: Tensor  # [1 + num_layers] int32: items; then for each layer, items drawn by programs beyond their first
    max_joins: int  # contexts whose parts are spread over several items, at most
    num_slots: int  # programs that run at once


@dataclass(frozen=True, slots=True)
class SharedDivision:
    """Division of attention over keys shared by rows of a decode step (`shared_division`).

    A bundle is some rows of a group. Items of a bundle follow each other, and each is a unit of the bundle's rows.
    """

    own_begins: Tensor  # [num_rows] int32: first tile that each row attends alone; 0 for a row without shared keys
    units: Tensor  # [num_rows] int32: first item of each row with shared keys
    pieces: Tensor  # [num_rows] int32: number of items of each row with shared keys
    places: Tensor  # [num_rows] int32: place of the row in its bundle
    members: Tensor  # [num_rows] int32: rows with shared keys, group after group
    items: Tensor  # [max_items, SHARED_ITEM_WORDS] int32
    num_items: Tensor  # [1] int32
    tokens: int  # rows of a bundle, at most
    num_slots: int  # programs that run at once


@dataclass(frozen=True, slots=True)
class SharedParts:
    """Results of the items of a `SharedDivision`; all layers share an instance, because layers run in sequence."""

    partial: Tensor  # [max_items, num_kv_heads, max_queries, head_dim] fp32: weighted sums of values
    maxima: Tensor  # [max_items, num_kv_heads, max_queries] fp32: maxima of scores, in units of log2
    sums: Tensor  # [max_items, num_kv_heads, max_queries] fp32: sums of weights
