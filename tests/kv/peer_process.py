"""A prefill worker's pool in a process of its own; run by the transport tests, driven over stdin.

`peer_process.py TRANSPORT DEVICE EPOCH NUM_BLOCKS` prints the hex of its `KVPoolExport` and then obeys:
`fill SEED` (random bytes everywhere but the proof block), `exit`.
"""

import os
import sys

import torch

from common.kv.pool import KVPool
from common.kv.transport import make_transport
from common.memory.pattern import pattern
from common.wire.frames import encode
from common.wire.handoff_messages import KVPoolExport
from common.wire.pool_shape import PoolShape
from tests.layouts import one_group

LAYOUT = one_group("model", num_layers=3, num_kv_heads=2, head_dim=32, block_size=16, dtype="float32")

BLOCK_BYTES = LAYOUT.groups[0].block_bytes


def random_bytes(seed: int, num_blocks: int) -> torch.Tensor:
    """What `fill SEED` puts into the pool: `[num_blocks, block_bytes]` uint8."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_blocks, BLOCK_BYTES), dtype=torch.uint8, generator=generator)


def main(transport_name: str, device_name: str, epoch: int, num_blocks: int) -> None:
    device = torch.device(device_name)
    transport = make_transport(transport_name, device)
    memory = transport.allocate(num_blocks * BLOCK_BYTES, device, f"test-{os.getpid()}")
    pool = KVPool(PoolShape(LAYOUT, (num_blocks,)), memory)
    pool.write_block(0, pattern(epoch, 0, BLOCK_BYTES))
    export = KVPoolExport(
        worker_id="p",
        epoch=epoch,
        pid=os.getpid(),
        transport=transport.name,
        pool_id=epoch,
        device_uuid="",
        handle=memory.handle(),
        num_blocks=(num_blocks,),
        layout=LAYOUT,
    )
    print(encode(export).hex(), flush=True)
    for line in sys.stdin:
        match line.split():
            case ["fill", seed]:
                pool.blocks[0][1:].copy_(random_bytes(int(seed), num_blocks)[1:])
                if device.type == "cuda":
                    torch.cuda.synchronize()
                print("filled", flush=True)
            case ["exit"]:
                pool.close()
                return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
