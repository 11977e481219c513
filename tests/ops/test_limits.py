"""A model that a chosen kernel does not compute is refused by name, and served where none of them is."""

import pytest

from common.base.errors import ModelError
from common.device.engine.engine import check_model
from common.models.config import DecoderConfig
from common.models.reading import decoder_config
from common.models.settings import Settings
from common.settings.config import KernelsSection
from tests.support.decoders import QWEN3_4B

NO_ATTENTION = KernelsSection(rope="torch", prefill_attention="torch", decode_attention="torch")


LATENT = {
    "model_type": "deepseek_v2",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def model(head_dim: int, vocab_size: int) -> DecoderConfig:
    sizes = {"head_dim": head_dim, "vocab_size": vocab_size, "num_hidden_layers": 1, "max_position_embeddings": 4096}
    return decoder_config(Settings(QWEN3_4B | sizes, "model"))


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256, 512])
def test_head_sizes_that_kernels_compute(head_dim: int) -> None:
    check_model(KernelsSection(), model(head_dim, 1 << 20))


@pytest.mark.parametrize("head_dim", [16, 80, 96, 192, 1024])
def test_other_head_sizes_are_refused_with_the_remedy(head_dim: int) -> None:
    with pytest.raises(
        ModelError, match=rf"head_dim = {head_dim}: kernels compute heads of 32, 64, 128, 256, 512; set"
    ) as error:
        check_model(KernelsSection(), model(head_dim, 1000))
    for name in ("kernels.rope", "kernels.prefill_attention", "kernels.decode_attention", "worker.device"):
        assert name in str(error.value)
    check_model(NO_ATTENTION, model(head_dim, 1000))


def test_vocabularies_too_large_to_sample_from_are_refused() -> None:
    with pytest.raises(ModelError, match=r"vocab_size = 1048577: kernels sample from at most 1048576 tokens"):
        check_model(KernelsSection(), model(128, (1 << 20) + 1))
    check_model(KernelsSection(sampling="torch"), model(128, (1 << 20) + 1))


@pytest.mark.parametrize(("rank", "changed"), [(512, {}), (256, {"qk_nope_head_dim": 64}), (16, {"v_head_dim": 16})])
def test_latents_that_kernels_compute(rank: int, changed: dict[str, int]) -> None:
    check_model(KernelsSection(), decoder_config(Settings(LATENT | {"kv_lora_rank": rank} | changed, "model")))


@pytest.mark.parametrize(("rank", "changed"), [(384, {}), (512, {"qk_nope_head_dim": 192}), (512, {"v_head_dim": 8})])
def test_other_latents_are_refused_with_the_remedy(rank: int, changed: dict[str, int]) -> None:
    config = decoder_config(Settings(LATENT | {"kv_lora_rank": rank} | changed, "model"))
    with pytest.raises(ModelError, match=r"kernels compute powers of two from 16 on; set kernels.rope and") as error:
        check_model(KernelsSection(), config)
    assert all(str(dim) in str(error.value) for dim in (rank, *changed.values()))
    check_model(NO_ATTENTION, config)
