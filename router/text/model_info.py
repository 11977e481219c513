"""Facts of the served model: identity, and limits of requests."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Identity of the model, which workers must share, and limits of requests."""

    name: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_model_len: int  # tokens of prompt plus output
    eos_token_ids: tuple[int, ...]
    files: str = ""  # where they are, and how large; for messages
