"""State that changes the logits of some sequences before sampling, at addresses known to kernels.

A sequence with adjustments has a slot. The slot is filled from the token log when the sequence enters a batch; steps
then update the slot. So the state survives a replay, because a replay carries the log.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.device.steps.word_uploader import WordUploader
from common.kernels.base.sampling_operands import (
    EDIT_FIELDS,
    IN_PROMPT,
    MAX_EDITS,
    MAX_WORDS,
    WORD_TOKENS,
    AdjustmentTensors,
    GrammarMasks,
)
from common.wire.values.packing import unpack_ids
from common.wire.values.sampling_params import (
    MAX_BAD_WORDS,
    MAX_BIASED,
    MAX_STOP_TOKENS,
    MAX_WORD_TOKENS,
    SamplingParams,
)

ALWAYS = (1 << 31) - 1
NO_MASK = -1
"""Position in a place without a mask."""
assert MAX_BIASED + MAX_STOP_TOKENS <= MAX_EDITS, "a slot holds what a request may ask for"
assert MAX_BAD_WORDS <= MAX_WORDS and MAX_WORD_TOKENS <= WORD_TOKENS, "and all its bad words"
NUM_PIECES = 6


class SlotFill(NamedTuple):
    """Contents of a slot: a sequence's state after `token_ids`, the prompt and then the outputs."""

    slot: int
    sampling: SamplingParams
    token_ids: Sequence[int]
    num_outputs: int  # outputs at the end of `token_ids`
    mask: np.ndarray | None = None  # [cdiv(vocab, 32)] int32: tokens allowed by the grammar, if known in advance
    place: int = -1  # place in `GrammarMasks`, if the mask arrives while steps run


def num_mask_words(vocab: int) -> int:
    """Return the number of words with a bit for each token."""
    return -(-vocab // 32)


def make_grammar_masks(num_places: int, max_rows: int, vocab: int, device: torch.device) -> GrammarMasks:
    """Make places without masks, for steps of up to `max_rows` rows."""
    is_cuda = device.type == "cuda"
    return GrammarMasks(
        masks_cpu=torch.zeros((num_places, num_mask_words(vocab)), dtype=torch.int32, pin_memory=is_cuda),
        positions_cpu=torch.full((num_places,), NO_MASK, dtype=torch.int32, pin_memory=is_cuda),
        are_late=torch.zeros(max_rows, dtype=torch.int32, device=device),
    )


class Adjustments:
    """Slots for `num_slots` sequences of a model with `vocab` tokens."""

    def __init__(self, num_slots: int, vocab: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros((num_slots, *shape), dtype=torch.int32, device=device)

        self.vocab = vocab
        self.tensors = AdjustmentTensors(
            counts=zeros(vocab),
            masks=zeros(num_mask_words(vocab)),
            edits=zeros(EDIT_FIELDS, MAX_EDITS),
            num_edits=zeros(),
            places=zeros(),
            words=zeros(WORD_TOKENS, MAX_WORDS),
            num_words=zeros(),
            recent=zeros(WORD_TOKENS),
        )
        self._uploader = WordUploader(device)

    def fill(self, fills: Sequence[SlotFill]) -> None:
        """Fill slots in stream order, with a single upload and a few launches for each slot."""
        if not fills:
            return
        pieces = [piece for fill in fills for piece in _pieces(fill, self.vocab)]
        words = self._uploader.send(np.concatenate(pieces)).split([len(piece) for piece in pieces])
        for i, fill in enumerate(fills):
            self._fill(fill, words[NUM_PIECES * i : NUM_PIECES * (i + 1)])

    def _fill(self, fill: SlotFill, pieces: Sequence[Tensor]) -> None:
        prompt, outputs, edits, mask, words, recent = pieces
        counts, masks, all_edits, num_edits, place, all_words, num_words, latest = (
            tensor[fill.slot] for tensor in self.tensors.columns()
        )
        place.fill_(fill.place)
        counts.zero_()
        counts.index_fill_(0, prompt.long(), IN_PROMPT)
        counts.index_add_(0, outputs.long(), torch.ones_like(outputs))
        num_edits.fill_(len(edits) // EDIT_FIELDS)
        all_edits[:, : len(edits) // EDIT_FIELDS] = edits.view(EDIT_FIELDS, -1)
        masks[:] = mask if len(mask) else -1
        num_words.fill_(len(words) // WORD_TOKENS)
        if len(words):
            all_words[:, : len(words) // WORD_TOKENS] = words.view(WORD_TOKENS, -1)
            latest[:] = recent


def _pieces(fill: SlotFill, vocab: int) -> tuple[np.ndarray, ...]:
    """Return prompt, outputs, edits, mask, bad words and latest outputs as int32; empty where unused."""
    num_prompt = len(fill.token_ids) - fill.num_outputs
    prompt, outputs = np.split(np.array(fill.token_ids, np.int32), [num_prompt])
    edits, mask = _edits(fill.sampling, num_prompt, vocab), _joined(_mask(fill.sampling, vocab), fill.mask)
    words = _words(fill.sampling)
    return prompt, outputs, edits, mask, words, _recent(num_prompt, outputs) if len(words) else words


def _joined(allowed: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Return the intersection of two masks, either of which may be missing."""
    if mask is None:
        return allowed
    return allowed & mask if len(allowed) else mask


def _edits(sampling: SamplingParams, num_prompt: int, vocab: int) -> np.ndarray:
    """Return biases, and bans of stop tokens before `min_tokens` outputs; columns of tokens, values, ends."""
    first_stop = min(ALWAYS, num_prompt + sampling.min_tokens)
    biases = zip(sampling.biased_token_ids, sampling.biases, strict=True)
    edits = [(token_id, bias, ALWAYS) for token_id, bias in biases]
    if sampling.min_tokens:
        edits += [(token_id, -np.inf, first_stop) for token_id in sampling.stop_token_ids]
    edits = [edit for edit in edits if edit[0] < vocab]  # a stop token may be outside the vocabulary
    token_ids, values, ends = zip(*edits, strict=True) if edits else ((), (), ())
    columns = (np.array(token_ids, np.int32), np.array(values, np.float32).view(np.int32), np.array(ends, np.int32))
    return np.concatenate(columns)


def _mask(sampling: SamplingParams, vocab: int) -> np.ndarray:
    """Return a mask with a bit for each allowed token."""
    if not sampling.allowed_token_ids:
        return np.empty(0, np.int32)
    allowed = np.zeros(num_mask_words(vocab) * 32, bool)
    token_ids = np.frombuffer(sampling.allowed_token_ids, np.int32)
    allowed[token_ids[token_ids < vocab]] = True
    return np.packbits(allowed, bitorder="little").view(np.int32)


def _words(sampling: SamplingParams) -> np.ndarray:
    """Return a column for each bad word, from last token to first."""
    columns = np.full((WORD_TOKENS, len(sampling.bad_words)), -1, np.int32)
    for i, packed in enumerate(sampling.bad_words):
        token_ids = unpack_ids(packed)
        columns[: len(token_ids), i] = token_ids[::-1]
    return columns.ravel()


def _recent(num_prompt: int, outputs: np.ndarray) -> np.ndarray:
    """Return the latest outputs, each at its position modulo WORD_TOKENS."""
    latest = np.full(WORD_TOKENS, -1, np.int32)
    num_latest = min(len(outputs), WORD_TOKENS)
    positions = num_prompt + len(outputs) - num_latest + np.arange(num_latest)
    latest[positions % WORD_TOKENS] = outputs[len(outputs) - num_latest :]
    return latest
