"""Allowed values shared by options of several sections."""

WORKER_ID = (r"[!-~]{0,100}", "at most 100 ASCII characters, no spaces")
SOCKET = (r"auto|/[!-~]{1,99}", "auto, or an absolute path of at most 100 ASCII characters")
MIN_STEP_TOKENS, MAX_STEP_TOKENS = 16, 1 << 20
DAY_S = 86_400.0
