"""Quantized checkpoints: how config.json and tensors say what is stored, and how plain matrices are made of it."""
