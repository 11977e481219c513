"""Names of number formats, as options, layouts and checkpoints write them, and what torch calls them."""

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
