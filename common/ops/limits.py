"""Limits of the kernels, checked against a model's config: an unsupported model is refused by name."""

from common.base.errors import ModelError
from common.kernels.base.operands import HEAD_DIMS, MAX_VOCAB
from common.settings.config import KernelsSection


def check_model(kernels: KernelsSection, head_dim: int, vocab_size: int) -> None:
    """Raise ModelError for a model that a chosen kernel does not compute."""
    attention = ("rope", "prefill_attention", "decode_attention")
    if head_dim not in HEAD_DIMS and (chosen := _chosen(kernels, *attention)):
        sizes = ", ".join(map(str, HEAD_DIMS))
        raise ModelError(f"head_dim = {head_dim}: kernels compute heads of {sizes}; {_remedy(chosen)}")
    if vocab_size > MAX_VOCAB and (chosen := _chosen(kernels, "sampling")):
        raise ModelError(
            f"vocab_size = {vocab_size}: kernels sample from at most {MAX_VOCAB} tokens; {_remedy(chosen)}"
        )


def _chosen(kernels: KernelsSection, *families: str) -> list[str]:
    return [f"kernels.{family}" for family in families if getattr(kernels, family) == "triton"]


def _remedy(chosen: list[str]) -> str:
    return f'set {" and ".join(chosen)} to "torch", which is slow, or worker.device to "cpu"'
