"""The part of the GPU for a prompt step: the whole GPU, or a share that leaves the rest to decode steps.

A share is a green context: kernels on the share's stream run on the share's multiprocessors only. A replayed graph
keeps the context of its capture. cuBLAS is told the number of multiprocessors. Invariant: steps run in launch order, on
either stream.
"""

import ctypes
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.cuda import green_contexts

from common.device.engine import cublas
from common.kernels.base.gpu import gpu_of

logger = logging.getLogger(__name__)

SM_GROUP = 8
"""Multiprocessors are allotted in groups of 8."""


class GpuShare:
    """The whole device, on the current stream; used where nothing is limited."""

    limited: torch.cuda.Stream | None = None
    """Stream confined to the share; None without a share."""

    def stream(self, *, whole: bool) -> AbstractContextManager[None]:
        """Return a context for the launch of a step; the step runs after all steps launched in earlier contexts."""
        return nullcontext()


class LimitedShare(GpuShare):
    """A stream with all multiprocessors, and a stream with a share.

    Args:
        whole: stream of steps on the whole GPU.
        limited: stream of steps on the share.
        num_planned: multiprocessors that cuBLAS plans for on the share; 0 if cuBLAS cannot be told.
    """

    def __init__(self, whole: torch.cuda.Stream, limited: torch.cuda.Stream, num_planned: int) -> None:
        self.whole = whole
        self.limited: torch.cuda.Stream = limited
        self.num_planned = num_planned
        self._last = whole  # work before the first step was launched there

    @contextmanager
    def stream(self, *, whole: bool) -> Iterator[None]:
        chosen = self.whole if whole else self.limited
        if chosen is not self._last:
            chosen.wait_stream(self._last)
            self._last = chosen
        is_planned = not whole and self.num_planned > 0
        with torch.cuda.stream(chosen), _products_planned_for(self.num_planned) if is_planned else nullcontext():
            yield


@contextmanager
def _products_planned_for(num_sms: int) -> Iterator[None]:
    cublas.set_sm_count(num_sms)
    try:
        yield
    finally:
        cublas.set_sm_count(0)


def make_share(percent: int, device: torch.device) -> GpuShare:
    """Build the share of `prefill.sm_share`; nothing is limited at 100 percent or on a CPU.

    A GPU that cannot be divided is used whole, with a warning: decode steps get longer, nothing fails.
    """
    if percent == 100 or device.type != "cuda":
        return GpuShare()
    num_sms = gpu_of(device).num_sms
    num_limited = share_of(num_sms, percent)
    try:
        limited = limited_stream(num_limited, device)
    except RuntimeError as error:
        reason, *_ = str(error).split("\n")
        problem = f"{num_limited} of {num_sms} multiprocessors cannot be set apart ({reason})"
        logger.warning("prefill.sm_share = %d: %s; prompts use the whole GPU and slow decode steps", percent, problem)
        return GpuShare()
    logger.info("prompts use %d of %d multiprocessors while something else is served", num_limited, num_sms)
    return LimitedShare(torch.cuda.current_stream(device), limited, num_limited if _cublas_listens() else 0)


def _cublas_listens() -> bool:
    """Tell whether cuBLAS can plan for a number of multiprocessors; log a warning if not."""
    try:
        cublas.set_sm_count(0)
    except (RuntimeError, OSError) as error:
        logger.warning("products on the share may take up to twice as long: cuBLAS cannot be told its size (%s)", error)
        return False
    return True


def limited_stream(num_sms: int, device: torch.device) -> torch.cuda.Stream:
    """Make a stream whose kernels run on `num_sms` multiprocessors only; raises RuntimeError if unsupported."""
    if not green_contexts.SUPPORTED:
        raise RuntimeError(f"PyTorch {torch.__version__} has no green contexts; one for CUDA 12.8 or later has")
    context: Any = green_contexts.GreenContext.create(num_sms=num_sms, device_id=device.index)
    stream: torch.cuda.Stream = context.Stream()
    # PyTorch keeps the stream's memory, with events on the stream, until the process ends. So the context must never
    # be destroyed: destruction earlier, or at the interpreter's end, aborts the process.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(context))
    return stream


def share_of(num_sms: int, percent: int) -> int:
    """Return the multiprocessors in `percent` of `num_sms`, rounded down to whole groups, at least one group."""
    return max(SM_GROUP, num_sms * percent // 100 // SM_GROUP * SM_GROUP)
