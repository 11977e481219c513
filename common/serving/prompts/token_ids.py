"""Token ids accepted by a model, and token ids that end a request; the router handles stop strings."""

from collections.abc import Sequence

import numpy as np

from common.base.errors import ErrorCode
from common.wire.messages.worker import FinishReason
from common.wire.values.sampling_params import SamplingParams

NO_CHOICE_REASON = (
    "the model's logits are all NaN or -inf, so there is no token to choose; check its weights, and model.dtype: "
    "float16 overflows where bfloat16 does not"
)
NO_TOKEN_FOLLOWS = (
    "no token can follow that its grammar, allowed_token_ids, bad_words and min_tokens all allow; ask for less"
)


def no_choice(*, has_grammar: bool) -> tuple[ErrorCode, str]:
    """Return code and reason of the failure of a request for which a step chose no token."""
    return (ErrorCode.GRAMMAR, NO_TOKEN_FOLLOWS) if has_grammar else (ErrorCode.NO_CHOICE, NO_CHOICE_REASON)


def finish_reason(token_id: int, num_outputs: int, sampling: SamplingParams) -> FinishReason:
    """Return whether and why `token_id`, output number `num_outputs` counted from 1, ends the request."""
    if token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    if num_outputs >= sampling.max_tokens:
        return FinishReason.LENGTH
    return FinishReason.NOT_FINISHED


def unknown_token(token_ids: Sequence[int], vocab_size: int) -> str:
    """Name a prompt's highest id if outside the embedding, because the id would end the worker; no id is negative."""
    highest = int(np.asarray(token_ids).max())
    return f"token {highest} is not among the {vocab_size} of this worker's model" if highest >= vocab_size else ""
