"""Memory with a life beyond workers: a small process for each device owns the memory, and workers map regions.

`server` and its imports are torch-free. `client` is the worker's side; `client.mapping` makes tensors.
"""
