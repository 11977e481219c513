"""The source process of `benchmarks.handoff`: owns and fills the pool, as a prefill worker does.

    python -m benchmarks.handoff_exporter DEVICE HEX_OF_POOL_WANTED [SECRET_FILE UCX_TRANSPORTS]

With a secret, the pool has a gate on loopback. Prints the hex of the `KVPoolExport`. Ends when stdin is closed, so
the process never outlives the benchmark.
"""

import sys

import torch
from torch import Tensor

from benchmarks.own_memory import own_memory
from common.kv.pool import KVPool
from common.kv.transport import make_transport
from common.memory.client.mapping import Mapping
from common.settings.config import NetSection
from common.wire.messages.frames import decode, encode
from common.wire.messages.handoff import KVPoolExport
from common.wire.messages.memory import PoolWanted

BLOCKS_AT_ONCE = 32
"""Blocks written or compared at once, a bound on memory beside the pool."""
_ODD = 0x5851F42D  # odd, so different places get different words; below 2^31, so int64 suffices


def words_of(block_ids: Tensor, block_bytes: int) -> Tensor:
    """Return the content of blocks `block_ids [num_ids]`: `[num_ids, block_bytes // 4]` int32, no two words alike."""
    num_words = block_bytes // 4
    place = block_ids.long()[:, None] * num_words + torch.arange(num_words, device=block_ids.device)
    return (place * _ODD & 0x7FFFFFFF).to(torch.int32)


def main(device_name: str, wanted: PoolWanted, net: NetSection) -> None:
    device = torch.device(device_name)
    with own_memory(device_name, net) as client:
        claim = client.claim_pool(wanted.layout, wanted.num_blocks)
        [blocks] = KVPool(claim.shape, Mapping(claim, device).tensor(writable=True)).blocks
        for ids in torch.arange(len(blocks), device=device).split(BLOCKS_AT_ONCE):
            blocks[ids] = words_of(ids, blocks.shape[1]).view(torch.uint8)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        export = KVPoolExport(
            worker_id="exporter",
            epoch=1,
            transport=make_transport("auto", device).name,
            device_uuid="",
            pool_id=claim.pool_id,
            memory_socket=str(client.path),
            layout=wanted.layout,
            gate=client.gate,
        )
        print(encode(export).hex(), flush=True)
        sys.stdin.read()


def lending(secret_file: str, ucx_transports: str) -> NetSection:
    """Return settings of a memory server with a gate on loopback, and of its visitors."""
    return NetSection(advertise="127.0.0.1", secret_file=secret_file, ucx_transports=ucx_transports)


def _decoded(frame_hex: str) -> PoolWanted:
    wanted = decode(bytes.fromhex(frame_hex))
    assert isinstance(wanted, PoolWanted)
    return wanted


if __name__ == "__main__":
    main(sys.argv[1], _decoded(sys.argv[2]), lending(*sys.argv[3:]) if sys.argv[3:] else NetSection())
