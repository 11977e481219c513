"""Check MPS on GPUs: open a CUDA context on each, and ask the daemon for a list of servers meanwhile.

    python mps_probe.py GPU_INDEX...

Run as a script by path, in a client's environment. Exit status 0 means MPS is really in use. Contexts alone would prove
nothing, because CUDA silently falls back to no MPS. Does not import torch.
"""

import ctypes
import subprocess
import sys

CONTROL_DEADLINE_S = 10.0


def main(indices: list[int]) -> str:
    """Return the problem, or an empty string."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    status = cuda.cuInit(0)
    for index in indices:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        status = status or cuda.cuDeviceGet(ctypes.byref(device), index)
        status = status or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        if status:
            return f"CUDA error {status} on GPU {index} as an MPS client"
    asked = subprocess.run(
        ["nvidia-cuda-mps-control"],
        input="get_server_list\n",
        capture_output=True,
        text=True,
        timeout=CONTROL_DEADLINE_S,
    )
    return "" if asked.stdout.strip() else "CUDA started without going through the MPS daemon"


if __name__ == "__main__":
    sys.exit(main([int(index) for index in sys.argv[1:]]) or 0)
