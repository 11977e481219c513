"""Log-probabilities of prompts, made up."""

import numpy as np

from common.device.steps.prompt_buffers import PromptChunk
from common.device.steps.prompt_scores import PromptScores
from common.kernels.base.sampling_operands import LOGPROB_WORDS


def scores_of(chunk: PromptChunk) -> PromptScores | None:
    """Of each token that the chunk is asked about one entry, its id, which is the likeliest."""
    if not chunk.scored:
        return None
    words = np.zeros((len(chunk.scored), LOGPROB_WORDS + 1), np.int32)
    words[:, 0] = words[:, -1] = 1
    words[:, 1] = [chunk.sequence_ids[position] for position in chunk.scored]
    return PromptScores(chunk.scored.start, words)
