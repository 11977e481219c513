"""How a program whose warps have different tasks takes work: items, drawn one by one from a ticket.

A ticket is a count in global memory. One warp draws the next item as soon as it has asked for all data
of the last, and writes its number down for the warps that compute. So programs that start late, as on a
share of the GPU or beside other kernels, own no work that all others have long passed.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def advance(slot, phase, STAGES: gl.constexpr):
    """The next slot of a ring, and the phase that its barriers are awaited in: another one every time around."""
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def draw(ticket_ptr):
    """The number of the next item, or one past the last."""
    return gl.atomic_add(ticket_ptr, 1, sem="relaxed")


@gluon.jit
def announce(item, item_smem, empty, phase):
    """Write down an item once all are done with the one before; what then arrives at their barrier comes after it."""
    mbarrier.wait(empty, phase)
    item_smem.store(gl.full([1], item, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    tl.debug_barrier()  # all lanes store; the one that arrives does so after all of them


@gluon.jit
def announced(item_smem, full, phase):
    """The item that was written down."""
    mbarrier.wait(full, phase)
    return gl.sum(item_smem.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), axis=0)
