"""Attention kernels of prompts and decode steps, and how they divide and join contexts."""
