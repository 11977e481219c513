"""Weights of GGUF files: which tensor holds which rows, and blocks made plain."""
