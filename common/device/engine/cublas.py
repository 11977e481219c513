"""How many multiprocessors cuBLAS plans for, on the calling thread.

Many of its kernels are programs that stay, one for each multiprocessor, and divide the tiles of a product among
themselves beforehand. Where fewer are free, those that find no place begin when the others are done, and the
product may take twice as long: whoever runs on a share of the GPU has to say so.
"""

import ctypes
from functools import cache

import torch


def set_sm_count(num_sms: int) -> None:
    """Plan products launched from now on for `num_sms` multiprocessors; 0 for all that the GPU has.

    Raises OSError or RuntimeError where cuBLAS cannot be told.
    """
    _check(_library().cublasSetSmCountTarget(_handle(), ctypes.c_int(num_sms)))


def sm_count() -> int:
    """What was set; 0 for all."""
    num_sms = ctypes.c_int()
    _check(_library().cublasGetSmCountTarget(_handle(), ctypes.byref(num_sms)))
    return num_sms.value


@cache
def _library() -> ctypes.CDLL:
    """The one that PyTorch has loaded."""
    version = torch.version.cuda
    if version is None:
        raise RuntimeError("this PyTorch is not built for CUDA")
    return ctypes.CDLL(f"libcublas.so.{version.split('.')[0]}")


def _handle() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_blas_handle())


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS status {status}")
