"""Programmatic dependent launch: a kernel starts while the one before it ends.

A kernel launched with `launch_pdl` may run before its predecessor has finished, but not before that
one's predecessor has: every kernel of a chain waits before it lets the next one start (but for
`wait_behind_next`). So what a
kernel does before `wait_for_predecessor` may touch anything that its direct predecessor neither
writes nor, if it is to be overwritten, reads. Weights always qualify; so does what the first kernel of
a step (slots, if they are needed), its last one (tokens, positions, seq_lens, turns) and the host's
changes between two steps write, for every kernel that does not follow them directly. After the wait
everything earlier is visible. Without `launch_pdl` both calls do nothing.
"""

import triton
import triton.language as tl


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """All that ran before is visible from here on, and the next kernel may start up to its own wait."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_behind_next(PDL: tl.constexpr):
    """As `wait_for_predecessor`, but the next kernel may start before this one's predecessor has finished, too.

    For a kernel before one that reads much ahead of its own wait, and nothing that the two before it write.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
