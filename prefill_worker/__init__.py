"""Computes prompts, samples the first token and hands KV blocks over.

Runs in: one process a GPU (or share of one), `python -m prefill_worker`. Owns: its block pool.
May import: `common`. Never: aiohttp, tokenizers, the router, the decode worker.
"""
