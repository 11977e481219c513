"""Work that needs all programs of a row done by the last of them to arrive, without one more launch."""

import triton
import triton.language as tl


@triton.jit
def is_last(arrivals_ptr, num_programs):
    """Whether all `num_programs` have arrived, so that what they stored is visible. The last one sets the count to 0.

    `arrivals_ptr`: one int32, 0 before the first arrival, and so 0 again for the next launch.
    """
    tl.debug_barrier()  # the stores of every thread come before the arrival of the program
    last = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == num_programs - 1
    if last:
        tl.store(arrivals_ptr, 0)
    return last
