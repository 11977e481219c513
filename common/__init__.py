"""What the three programs share.

Runs in: router, prefill worker, decode worker.
Floor (torch-free): `messages wire sockets config options errors log kv_layout sampling_params`.
Torch rooms (workers only): `models ops kernels kv landing prompt_buffers prompt_runner`.
May import: nothing above itself. This file re-exports nothing, so that importing one floor module never pulls in torch.
"""
