"""The prefill worker: computes prompts, samples the first token and hands KV blocks over.

Runs in: a process per GPU (or share of a GPU), `python -m prefill_worker`. Owns: blocks leased from a block pool.
May import: `common`. Never: aiohttp, tokenizers, the router, the decode worker.
"""
