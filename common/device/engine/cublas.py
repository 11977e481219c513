"""The number of multiprocessors that cuBLAS plans for, on the calling thread.

Many cuBLAS kernels are persistent: each multiprocessor runs a program, and the tiles are divided in advance. With fewer
free multiprocessors, the surplus programs start after the others, and a product may take twice as long. So code on a
share of the GPU must set the number.
"""

import ctypes
from functools import cache

import torch


def set_sm_count(num_sms: int) -> None:
    """Plan products launched from now on for `num_sms` multiprocessors; 0 means the whole GPU.

    Raises OSError or RuntimeError if cuBLAS cannot be told.
    """
    _check(_library().cublasSetSmCountTarget(_handle(), ctypes.c_int(num_sms)))


@cache
def _library() -> ctypes.CDLL:
    """Return the cuBLAS loaded by PyTorch."""
    version = torch.version.cuda
    if version is None:
        raise RuntimeError("this PyTorch is not built for CUDA")
    return ctypes.CDLL(f"libcublas.so.{version.split('.')[0]}")


def _handle() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_blas_handle())


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS status {status}")
