import torch

from common.ops.gathering import is_gathered


def test_which_steps_gather_keys() -> None:
    def is_it(
        num_tokens: int, num_keys: int, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, num_seqs: int = 1
    ) -> bool:
        return is_gathered(torch.empty(num_tokens, 2, head_dim, dtype=dtype), num_seqs, num_keys)

    assert is_it(513, 513) and is_it(2000, 65536, 64, torch.float16)
    assert not is_it(512, 512)
    assert not is_it(2000, 0), "only the device knows how many keys there are"
    assert not is_it(2000, 65537)
    assert not is_it(1024, 1024, num_seqs=16), "64 keys of each sequence are too few to gather"
    assert is_it(1024, 1040, num_seqs=16)
    assert not is_it(2000, 2000, 96) and not is_it(2000, 2000, 256)
    assert not is_it(2000, 2000, dtype=torch.float32)
