"""Triton operations, a file each: the kernel and its checked launcher. References are in `common.ops.reference`.

Knows torch and triton only.
"""
