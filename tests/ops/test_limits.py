"""A model that a chosen kernel does not compute is refused by name, and served where none of them is."""

import pytest

from common.base.errors import ModelError
from common.device.engine.engine import check_model
from common.settings.config import KernelsSection

NO_ATTENTION = KernelsSection(rope="torch", prefill_attention="torch", decode_attention="torch")


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_head_sizes_that_kernels_compute(head_dim: int) -> None:
    check_model(KernelsSection(), head_dim, 1 << 20)


@pytest.mark.parametrize("head_dim", [16, 80, 96, 192, 512])
def test_other_head_sizes_are_refused_with_the_remedy(head_dim: int) -> None:
    with pytest.raises(
        ModelError, match=rf"head_dim = {head_dim}: kernels compute heads of 32, 64, 128, 256; set"
    ) as error:
        check_model(KernelsSection(), head_dim, 1000)
    for name in ("kernels.rope", "kernels.prefill_attention", "kernels.decode_attention", "worker.device"):
        assert name in str(error.value)
    check_model(NO_ATTENTION, head_dim, 1000)


def test_vocabularies_too_large_to_sample_from_are_refused() -> None:
    with pytest.raises(ModelError, match=r"vocab_size = 1048577: kernels sample from at most 1048576 tokens"):
        check_model(KernelsSection(), 128, (1 << 20) + 1)
    check_model(KernelsSection(sampling="torch"), 128, (1 << 20) + 1)
