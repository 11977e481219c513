"""The other process of `benchmarks.handoff`: owns the pool that is pulled from, as a prefill worker does.

    python -m benchmarks.handoff_exporter DEVICE NUM_BLOCKS LAYOUT_JSON

Prints the hex of its `KVPoolExport` and ends when its stdin does, so it never outlives the benchmark.
"""

import json
import os
import sys

import torch
from torch import Tensor

from common.kv.pool import KVPool
from common.kv.transport import make_transport
from common.wire.frames import encode
from common.wire.handoff_messages import KVPoolExport
from common.wire.kv_layout import PROOF_BLOCK, KVLayout

BLOCKS_AT_ONCE = 32
"""Blocks written or compared together, which bounds the memory it takes beside the pool."""
_ODD = 0x5851F42D  # odd, so that different places get different words; below 2^31, so that int64 suffices


def words_of(block_ids: Tensor, block_bytes: int) -> Tensor:
    """What the exporter keeps in blocks `block_ids [num_ids]`: `[num_ids, block_bytes // 4]` int32, no two alike."""
    num_words = block_bytes // 4
    place = block_ids.long()[:, None] * num_words + torch.arange(num_words, device=block_ids.device)
    return (place * _ODD & 0x7FFFFFFF).to(torch.int32)


def main(device_name: str, num_blocks: int, layout: KVLayout) -> None:
    device = torch.device(device_name)
    transport = make_transport("auto", device)
    pool = KVPool(layout, transport.allocate(num_blocks * layout.block_bytes, device, f"handoff-{os.getpid()}"))
    for ids in torch.arange(num_blocks, device=device).split(BLOCKS_AT_ONCE):
        pool.blocks[ids] = words_of(ids, layout.block_bytes).view(torch.uint8)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    handle = pool.memory.handle()
    export = KVPoolExport(
        worker_id="exporter",
        epoch=1,
        pid=os.getpid(),
        transport=transport.name,
        device_uuid="",
        pool_id=1,
        handle=handle,
        num_blocks=num_blocks,
        layout=layout,
        proof_block=PROOF_BLOCK,
    )
    print(encode(export).hex(), flush=True)
    sys.stdin.read()
    pool.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), KVLayout(**json.loads(sys.argv[3])))
