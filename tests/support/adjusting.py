"""What penalties, biases and bans mean, by vLLM's rules and in its order: what all that adjusts logits is held to."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from common.wire.values.packing import unpack_ids
from common.wire.values.sampling_params import SamplingParams


def adjusted(logits: Tensor, params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int]) -> Tensor:
    """`logits [vocab]` of the token after the outputs."""
    x = logits.clone()
    if allowed := {*unpack_ids(params.allowed_token_ids)}:
        x[[token for token in range(len(x)) if token not in allowed]] = -math.inf
    if len(outputs) < params.min_tokens:
        x[list(params.stop_token_ids)] = -math.inf
    for word in map(unpack_ids, params.bad_words):
        num_before = len(word) - 1
        if num_before <= len(outputs) and [*outputs[len(outputs) - num_before :]] == word[:-1] and word[-1] < len(x):
            x[word[-1]] = -math.inf
    for token, bias in zip(params.biased_token_ids, params.biases, strict=True):
        x[token] += bias
    seen = list({*prompt, *outputs})
    x[seen] = torch.where(x[seen] > 0, x[seen] / params.repetition_penalty, x[seen] * params.repetition_penalty)
    for token in outputs:
        x[token] -= params.frequency_penalty
    x[list(set(outputs))] -= params.presence_penalty
    return x
