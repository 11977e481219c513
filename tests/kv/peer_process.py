"""A prefill worker's part in a pool that others pull from; run by the transport tests, driven over stdin.

`peer_process.py SOCKET DEVICE NUM_BLOCKS` prints the id of the pool at that memory server and then obeys:
`fill SEED` (random bytes everywhere but the proof block), `exit`.
"""

import sys
from pathlib import Path

import torch

from common.kv.pool import KVPool
from common.memory.client.client import MemoryClient
from common.memory.client.mapping import Mapping
from tests.support.layouts import one_group

LAYOUT = one_group("model", num_layers=3, num_kv_heads=2, head_dim=32, block_size=16, dtype="float32")

BLOCK_BYTES = LAYOUT.groups[0].block_bytes


def random_bytes(seed: int, num_blocks: int) -> torch.Tensor:
    """What `fill SEED` puts into the pool: `[num_blocks, block_bytes]` uint8."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_blocks, BLOCK_BYTES), dtype=torch.uint8, generator=generator)


def main(socket: str, device_name: str, num_blocks: int) -> None:
    device = torch.device(device_name)
    claim = MemoryClient(Path(socket), "p", 1, is_decoding=False).claim_pool(LAYOUT, (num_blocks,))
    pool = KVPool(claim.shape, Mapping(claim, device).tensor(writable=True))
    print(claim.pool_id, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["fill", seed]:
                pool.blocks[0][1:].copy_(random_bytes(int(seed), num_blocks)[1:])
                if device.type == "cuda":
                    torch.cuda.synchronize()
                print("filled", flush=True)
            case ["exit"]:
                return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
