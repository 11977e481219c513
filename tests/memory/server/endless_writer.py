"""Launches kernels that write for seconds to memory of another: `tests.memory.server.endless_writer HANDLE_HEX`."""

import sys
import time

import torch
import triton
import triton.language as tl

from common.memory.client.client import Claim
from common.memory.client.mapping import Mapping

NUM_WRITES, NUM_KERNELS = 4_000_000, 8


@triton.jit
def _count_kernel(counter, num_writes):  # type: ignore[no-untyped-def]
    last = 0  # where to depends on it, so that each waits for the one before
    for _ in range(num_writes):
        last = tl.atomic_add(counter + tl.minimum(last, 0), 1)


def main() -> None:
    device = torch.device("cuda", 0)
    region = Mapping(Claim(bytes.fromhex(sys.argv[1]), None, 2 << 20), device).tensor(writable=True)
    counter = region[:4].view(torch.int32)
    _count_kernel[(1,)](counter, 1)
    torch.cuda.synchronize()
    for _ in range(NUM_KERNELS):
        _count_kernel[(1,)](counter, NUM_WRITES)
    print("launched", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
