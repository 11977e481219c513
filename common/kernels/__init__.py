"""One Triton operation a file: the kernel and its checked launcher. Its reference is in `common.ops.reference`.

Knows torch and triton only.
"""
