"""The HTTP server: tokenizes, dispatches, orders tokens, and replays completions lost by a dead worker.

Runs in: a single process, `python -m router`. Owns: the state of every request.

May import: the torch-free base of `common`, aiohttp, tokenizers. Never: torch, triton, safetensors, a worker.
"""
