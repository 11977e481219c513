"""Kernels that read and write each value once: norms, gates, embedding, RoPE, copies of rows and blocks."""
