"""Kernels compiled ahead for GPUs that are not there: the warm-up of a worker, on tensors without memory."""
