"""Import of torch without what it registers for tensors without memory, which no worker has; import before torch.

These are some thousand functions in Python, a sixth of a worker's imports. Whoever needs them imports
`torch._meta_registrations`, which registers them then.
"""

import sys
from types import ModuleType

LEFT_OUT = "torch._meta_registrations"

if "torch" not in sys.modules:
    sys.modules[LEFT_OUT] = ModuleType(LEFT_OUT)
    try:
        import torch  # noqa: F401 - imported for others
    finally:
        del sys.modules[LEFT_OUT]
