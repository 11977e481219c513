"""Maxima and sums of the columns of a product, whose rows lie in four warps. Gluon, Hopper only.

Each warp leaves its result in shared memory, and every thread reads the results of all warps. So the warps wait for
each other once; in a reduction by Triton they wait three times.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _whole_columns(warps, columns):
    """Return a layout in which a thread has whole columns: those of which it has rows in a product."""
    registers = [[0, 1]] + ([[0, 8]] if columns == 16 else []) + [[1, 0], [2, 0]]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0], [0, 0]], [], [warps, columns])


@gluon.jit
def _of_warps(product, warps_smem):
    WARPS: gl.constexpr = warps_smem.shape[0]
    return product.reshape((WARPS, product.shape[0] // WARPS, product.shape[1]))


@gluon.jit
def _everywhere(results, warps_smem):
    warps_smem.store(results)
    return warps_smem.load(_whole_columns(warps_smem.shape[0], warps_smem.shape[1]))


@gluon.jit
def column_max(product, warps_smem):
    """Return the maximum of each column; `warps_smem`, `[warps, columns]` fp32, is room for those of each warp."""
    results = _everywhere(gl.max(_of_warps(product, warps_smem), axis=1), warps_smem)
    return gl.convert_layout(gl.max(results, axis=0), gl.SliceLayout(0, product.type.layout))


@gluon.jit
def column_sum(product, warps_smem):
    """Return the sum of each column; `warps_smem` as in `column_max`."""
    results = _everywhere(gl.sum(_of_warps(product, warps_smem), axis=1), warps_smem)
    return gl.convert_layout(gl.sum(results, axis=0), gl.SliceLayout(0, product.type.layout))
