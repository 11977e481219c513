"""Programmatic dependent launch: a kernel starts while the kernel before ends.

A kernel launched with `launch_pdl` may run before its predecessor has finished, but not before the predecessor's
predecessor has. The reason: every kernel of a chain waits before letting the next kernel start. Only `wait_behind_next`
departs from this order.

Before `wait_for_predecessor`, a kernel may touch only memory not written by the direct predecessor. Memory to be
overwritten must not be read by the direct predecessor either. Weights always qualify. Other memory qualifies for
kernels that do not directly follow the writer:

  - results of a step's first kernel: slots, if needed.
  - results of a step's last kernel: tokens, positions, seq_lens, turns.
  - changes by the host between two steps.

After the wait, everything earlier is visible. Without `launch_pdl`, both calls do nothing.
"""

import triton
import triton.language as tl


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Wait until all earlier work is visible, then let the next kernel run up to its own wait."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_behind_next(PDL: tl.constexpr):
    """Let the next kernel start first, then wait: the next kernel may start before the predecessor has finished.

    For a kernel whose successor reads much ahead of its own wait, but nothing written by the two kernels before the
    successor.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
