"""Kernels between the last product and the next token: adjustments, filters, draws, log-probabilities."""
