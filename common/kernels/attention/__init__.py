"""Attention kernels of prompts and decode steps, with division and joining of contexts."""
