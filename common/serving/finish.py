"""When a request is over, by tokens alone; stop strings are the router's business."""

from common.wire.messages import FinishReason
from common.wire.sampling_params import SamplingParams

NO_CHOICE_REASON = (
    "the model's logits are all NaN or -inf, so there is no token to choose; check its weights, and model.dtype: "
    "float16 overflows where bfloat16 does not"
)
NO_TOKEN_FOLLOWS = (
    "no token can follow that its grammar, allowed_token_ids, bad_words and min_tokens all allow; ask for less"
)


def finish_reason(token_id: int, num_outputs: int, sampling: SamplingParams) -> FinishReason:
    """Whether `token_id`, the output number `num_outputs` counted from 1, ends the request."""
    if token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    if num_outputs >= sampling.max_tokens:
        return FinishReason.LENGTH
    return FinishReason.NOT_FINISHED
