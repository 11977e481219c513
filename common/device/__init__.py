"""Computation on a worker's device: the model and its KV pool, prompt steps, and tokens on the way back."""
