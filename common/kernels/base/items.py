"""Work items for programs whose warps have different tasks: items are drawn singly from a ticket.

A ticket is a count in global memory. A warp draws the next item as soon as all data of the last item are requested. The
warp writes the item's number down for the warps with arithmetic. So programs starting late, on a shared GPU or beside
other kernels, own no work long passed by the others.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def advance(slot, phase, STAGES: gl.constexpr):
    """Return the next slot of a ring, and the phase in which to await its barriers; the phase flips on every wrap."""
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def draw(ticket_ptr):
    """Return the number of the next item; a number past the last means no item."""
    return gl.atomic_add(ticket_ptr, 1, sem="relaxed")


@gluon.jit
def announce(item, item_smem, empty, phase):
    """Write down an item once all warps are done with the item before; publish by a later arrival at their barrier."""
    mbarrier.wait(empty, phase)
    item_smem.store(gl.full([1], item, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    tl.debug_barrier()  # all lanes store; the lane that arrives does so after all stores


@gluon.jit
def announced(item_smem, full, phase):
    """Return the item written down by `announce`."""
    mbarrier.wait(full, phase)
    return gl.sum(item_smem.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), axis=0)
