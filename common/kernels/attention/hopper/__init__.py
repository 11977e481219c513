"""Attention kernels that Hopper GPUs alone run, and their parts."""
