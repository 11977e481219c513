"""Weights from files into memory: safetensors and GGUF, in stacks whose form is chosen before."""
