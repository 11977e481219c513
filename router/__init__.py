"""The HTTP side: tokenizes, dispatches, puts tokens in order, replays what a dead worker lost.

Runs in: one process, `python -m router`. Owns: the state of every request.
May import: the floor of `common`, aiohttp, tokenizers. Never: torch, triton, safetensors, a worker.
"""
