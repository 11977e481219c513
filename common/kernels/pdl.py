"""Programmatic dependent launch: a kernel starts while the one before it ends.

A kernel launched with `launch_pdl` may run before its predecessor has finished. What it does before
`wait_for_predecessor` may therefore touch only what no kernel of the step writes: weights, tables,
K and V of past tokens. After the wait everything earlier is visible, because every kernel of a chain
waits before it lets the next one start. Without `launch_pdl` both calls do nothing.
"""

import triton
import triton.language as tl


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """All that ran before is visible from here on, and the next kernel may start up to its own wait."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
