"""Detection of the last program of a row to arrive, which can use the results of all others without another launch."""

import triton
import triton.language as tl


@triton.jit
def is_last(arrivals_ptr, num_programs):
    """Tell whether all `num_programs` have arrived, with their stores visible; the last program resets the count to 0.

    `arrivals_ptr`: an int32, 0 before the first arrival, and 0 again for the next launch.
    """
    tl.debug_barrier()  # the stores of every thread come before the arrival of the program
    last = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == num_programs - 1
    if last:
        tl.store(arrivals_ptr, 0)
    return last
