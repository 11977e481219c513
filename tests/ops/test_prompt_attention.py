"""Which kernel computes attention of a prompt step, and that what is chosen computes it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.kernels.base.attention_operands import AttentionWeights
from common.kernels.base.gpu import Gpu
from common.ops.base import ForwardBatch, GroupCache
from common.ops.prompt_attention import has_few_queries, is_gathered
from common.ops.torch_ops import TorchOps
from common.settings.config import KernelsSection

BLOCK_SIZE, NUM_Q, NUM_KV, HEAD_DIM = 16, 4, 2, 32


def test_which_steps_gather_keys() -> None:
    def is_it(
        num_tokens: int,
        num_keys: int,
        head_dim: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        num_seqs: int = 1,
    ) -> bool:
        return is_gathered(torch.empty(num_tokens, 2, head_dim, dtype=dtype), num_seqs, num_keys)

    assert is_it(513, 513) and is_it(2000, 65536, 64, torch.float16)
    assert not is_it(512, 512)
    assert not is_it(2000, 0), "only the device knows how many keys there are"
    assert not is_it(2000, 65537)
    assert not is_it(1024, 1024, num_seqs=16), "64 keys of each sequence are too few to gather"
    assert is_it(1024, 1040, num_seqs=16)
    assert is_it(2000, 2000, 64) and not is_it(2000, 2000, 96) and is_it(2000, 2000, 256)
    assert not is_it(2000, 2000, dtype=torch.float32)


def test_which_steps_cut_contexts() -> None:
    def is_it(num_tokens: int, num_q: int = 32, num_kv: int = 8, dtype: torch.dtype = torch.bfloat16) -> bool:
        return has_few_queries(torch.empty(num_tokens, num_q, 64, dtype=dtype), num_kv)

    assert is_it(1) and is_it(128) and not is_it(129)
    assert is_it(16, 64, 1) and not is_it(16, 65, 1), "heads of one KV head share a tile of 64 rows"
    assert is_it(16, 32, 1, torch.float32) and not is_it(16, 33, 1, torch.float32)


def one_prompt(num_tokens: int, seq_len: int) -> ForwardBatch:
    """The last tokens of a prompt whose blocks are in order."""
    positions = torch.arange(seq_len - num_tokens, seq_len)
    return ForwardBatch(
        token_ids=positions.int(),
        positions=positions.int(),
        slots=(positions,),
        block_tables=(torch.arange(-(-seq_len // BLOCK_SIZE), dtype=torch.int32).unsqueeze(0),),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, num_tokens], dtype=torch.int32),
        last_tokens=torch.tensor([num_tokens - 1]),
        max_query_len=num_tokens,
        max_seq_len=seq_len,
    )


@pytest.mark.medium
@pytest.mark.skipif(torch.cuda.is_available(), reason="for Triton's interpreter; test_cuda_ops is for the GPU")
@pytest.mark.parametrize(
    ("num_tokens", "kernels"),
    [
        (128, ["few_query_attention", "few_query_attention"]),
        (129, ["prefill_attention", "few_query_attention"]),
        (2, ["few_query_attention", "few_query_attention"]),
    ],
)
def test_a_layer_and_the_last_layer_have_their_kernels(
    num_tokens: int, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from common.ops import cuda_attention, workspaces

    called: list[str] = []

    def noted(name: str, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapper(*args: object, **kwargs: object) -> Tensor:
            called.append(name)
            return kernel(*args, **kwargs)

        return wrapper

    for name in ("few_query_attention", "prefill_attention", "long_attention"):
        monkeypatch.setattr(cuda_attention, name, noted(name, getattr(cuda_attention, name)))
    for module in (cuda_attention, workspaces):
        monkeypatch.setattr(module, "gpu_of", lambda device: Gpu("interpreter", (9, 0), 4, 227 << 10))
    torch.manual_seed(5)
    batch = one_prompt(num_tokens, 600)
    rope = torch.cat((torch.ones(600, HEAD_DIM // 2), torch.zeros(600, HEAD_DIM // 2)), dim=1)
    weights = AttentionWeights(
        q_norm=None,
        k_norm=None,
        norm_eps=1e-6,
        rope=rope,
        num_q_heads=NUM_Q,
        num_kv_heads=NUM_KV,
        head_dim=HEAD_DIM,
        scale=HEAD_DIM**-0.5,
    )
    pool = torch.randn(38, 1, 2, BLOCK_SIZE, NUM_KV, HEAD_DIM)
    qkv = torch.randn(num_tokens, (NUM_Q + 2 * NUM_KV) * HEAD_DIM)
    cache, section = GroupCache(pool.clone(), NUM_Q), KernelsSection(rope="torch")
    ours, theirs = cuda_attention.CudaAttention(cache, section, 1, pdl=False), TorchOps([GroupCache(pool, NUM_Q)])
    for attend, law in ((ours.attend, theirs.attention), (ours.attend_last, theirs.attention_of_last)):
        torch.testing.assert_close(attend(qkv, weights, 0, batch), law(qkv, weights, 0, batch), rtol=1e-4, atol=1e-5)
    assert called == kernels
