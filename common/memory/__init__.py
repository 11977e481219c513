"""Memory that outlives the workers that use it: one small process for each device owns it, and workers map it.

`server` and all it needs are torch-free; `client` is what workers have of it, `mapping` makes tensors of it.
"""
