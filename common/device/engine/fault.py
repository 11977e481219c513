"""Test whether an error has made the device useless to the process.

After running out of memory or a refused launch, the device still works. A kernel with an invalid access or a hardware
failure ends the process's CUDA context, and every later call returns the error. Until then, other threads of the kernel
may have written anywhere in the memory mapped here.
"""

import threading

import torch

ANSWER_S = 5.0
"""Longest wait for running work; a hanging device shows no fault."""


def device_fault() -> str:
    """Return the error that the device gives to every call; empty if the device works or was never used."""
    if not torch.cuda.is_initialized():
        return ""
    problems: list[str] = []

    def synchronize() -> None:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            problems.append(str(error).partition("\n")[0] or type(error).__name__)

    thread = threading.Thread(target=synchronize, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    return problems[0] if problems else ""
