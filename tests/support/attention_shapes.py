"""Shapes of attention in models whose layers see a window, have sinks, or have large heads."""

from typing import NamedTuple


class Seeing(NamedTuple):
    """Heads, and the tokens that attention sees."""

    num_q: int
    num_kv: int
    head_dim: int
    window: int = 0  # 0: all
    has_sinks: bool = False


GPT_OSS = Seeing(64, 8, 64, 128, has_sinks=True)
GPT_OSS_FULL = Seeing(64, 8, 64, has_sinks=True)
GEMMA_3_4B = Seeing(8, 4, 256, 1024)
GEMMA_3_4B_FULL = Seeing(8, 4, 256)
GEMMA_4_31B_FULL = Seeing(32, 4, 512)
MISTRAL_7B = Seeing(32, 8, 128, 4096)
SEEING = [GPT_OSS, GPT_OSS_FULL, GEMMA_3_4B, GEMMA_3_4B_FULL, GEMMA_4_31B_FULL, MISTRAL_7B]
GATHERED = [seeing for seeing in SEEING if seeing.head_dim <= 256]
