"""What the router tells of the model it serves, and bounds requests by."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a worker must agree with, and what bounds a request."""

    name: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_model_len: int  # prompt plus output, tokens
    eos_token_ids: tuple[int, ...]
