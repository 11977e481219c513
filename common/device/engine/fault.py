"""Whether a device is of any more use to this process after an error.

After running out of memory, or a launch that was refused, it is: whoever asks it for something else gets that. A
kernel that touched what it may not, or that the hardware gave up, ends the process's context: from then on every call
returns that error. What other threads of such a kernel have written until then lies anywhere in what is mapped here.
"""

import threading

import torch

ANSWER_S = 5.0
"""For what is under way to end; a device that hangs has shown no fault."""


def device_fault() -> str:
    """What the device answers to everything; empty if it works, or none was used."""
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
