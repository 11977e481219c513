"""The cap of logits against its formula, beyond the cap and near 0."""

import pytest
import torch

from common.kernels.elementwise.cap_logits import cap_logits


@pytest.mark.parametrize(("num_tokens", "vocab", "cap"), [(3, 5003, 30.0), (0, 8, 30.0), (1, 2048, 3.0)])
@pytest.mark.filterwarnings("ignore:overflow encountered")  # the interpreter's numpy; infinity is right
def test_equals_the_formula(num_tokens: int, vocab: int, cap: float, device: torch.device) -> None:
    logits = torch.randn(num_tokens, vocab) * 2 * cap
    logits[:, :4] = torch.tensor([0.0, 1e-3, 5000.0, -5000.0])
    expected, logits = cap * torch.tanh(logits.double() / cap), logits.to(device)
    assert cap_logits(logits, cap) is logits
    assert torch.allclose(logits.double().cpu(), expected, atol=1e-6 * cap, rtol=0)


def test_others_are_refused() -> None:
    with pytest.raises(AssertionError, match="fp32"):
        cap_logits(torch.zeros(2, 8).half(), 30.0)
    with pytest.raises(AssertionError, match="positive"):
        cap_logits(torch.zeros(2, 8), 0.0)
