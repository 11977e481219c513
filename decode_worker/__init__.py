"""The decode worker: pulls KV blocks and decodes all sequences together, a token each a step.

Runs in: one process a GPU (or share of one), `python -m decode_worker`. Owns: its block pool.
May import: `common`. Never: aiohttp, tokenizers, the router, the prefill worker.
"""
