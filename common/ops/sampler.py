"""Choice of the next token, by kernel or by reference."""

from typing import NamedTuple

import torch
from torch import Tensor

from common.kernels.base.sampling_operands import (
    AdjustmentTensors,
    GrammarMasks,
    LogprobRing,
    SamplingTensors,
    TokenRing,
)
from common.ops import reference
from common.ops.base import ForwardBatch


class AdjustedRows(NamedTuple):
    """Rows whose logits may be adjusted; each tensor is `[num_rows]` int32."""

    slots: Tensor  # of `AdjustmentTensors`; -1 for none
    token_ids: Tensor  # last tokens, which are counted
    positions: Tensor  # of the tokens to sample


class Sampler:
    """Samples up to `max_rows` rows of `vocab` logits; holds the kernels' workspace.

    Args:
        kernels_choice: "triton", which needs a GPU, or "torch".
        pdl: launch kernels before their predecessors have finished.
    """

    def __init__(
        self, kernels_choice: str, max_rows: int, vocab: int, device: torch.device, *, pdl: bool = False
    ) -> None:
        self.max_rows = max_rows
        self._has_kernels = kernels_choice == "triton"
        self._pdl = pdl
        if self._has_kernels:
            # Imported here, so that a process on a CPU loads no triton.
            from common.kernels.sampling import logprobs, sampling
            from common.kernels.sampling.adjust_logits import adjust_logits

            self._kernels = sampling
            self._adjust_logits = adjust_logits
            self._logprobs = logprobs
            self._workspace = sampling.make_workspace(max_rows, vocab, device)

    def adjust(
        self,
        logits: Tensor,
        params: SamplingTensors,
        rows: AdjustedRows,
        adjustments: AdjustmentTensors,
        grammars: GrammarMasks | None = None,
    ) -> None:
        """Change fp32 `logits [num_rows, vocab]` of the rows with a slot before they are sampled.

        Masks of `grammars` may become known while the step runs; rows with a late mask get no choice.
        """
        columns = (logits, params, rows.slots, adjustments, rows.token_ids, rows.positions, grammars)
        if self._has_kernels:
            self._adjust_logits(*columns, pdl=self._pdl)
        else:
            reference.adjust_logits(*columns)

    def sample(self, logits: Tensor, params: SamplingTensors, positions: Tensor) -> Tensor:
        """Return token ids `[num_rows]` int32 for fp32 `logits [num_rows, vocab]` and `positions [num_rows]` int32."""
        if self._has_kernels:
            return self._kernels.sample(logits, params, positions, self._workspace, pdl=self._pdl)
        return reference.sample(logits, params, positions)

    def sample_and_advance(self, logits: Tensor, params: SamplingTensors, batch: ForwardBatch, ring: TokenRing) -> None:
        """End a decode step: each row's chosen token becomes its last token, and positions and seq_lens grow.

        The host finds the tokens in `ring`.
        """
        if self._has_kernels:
            columns = (batch.token_ids, batch.positions, batch.seq_lens)
            self._kernels.sample_and_advance(
                logits, params, *columns, batch.max_seq_len, ring, self._workspace, pdl=self._pdl
            )
        else:
            tokens = reference.sample(logits, params, batch.seq_lens)
            reference.advance(batch, tokens)
            reference.land(tokens, ring)

    def logprobs(self, logits: Tensor, num_wanted: Tensor, tokens: Tensor) -> Tensor:
        """Return `[num_rows, LOGPROB_WORDS]` int32: log-probabilities of `tokens [num_rows]` and the likeliest tokens.

        `logits` are fp32 `[num_rows, vocab]`. `num_wanted`, `[num_rows]` int32, counts the entries of each row, as in
        `reference.logprobs`.
        """
        if self._has_kernels:
            return self._logprobs.logprobs(logits, num_wanted, tokens, pdl=self._pdl)
        return reference.logprobs(logits, num_wanted, tokens)

    def land_logprobs(self, logits: Tensor, params: SamplingTensors, tokens: Tensor, ring: LogprobRing) -> None:
        """Leave log-probabilities of the tokens chosen by `sample_and_advance` in `ring`; call behind it."""
        if self._has_kernels:
            self._logprobs.land_logprobs(logits, params.num_logprobs, tokens, ring, pdl=self._pdl)
        else:
            reference.land_logprobs(reference.logprobs(logits, params.num_logprobs, tokens), ring)
