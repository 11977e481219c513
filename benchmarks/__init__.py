"""Measurements: load generators, benchmarks of kernels and handoffs, and results as rows.

Nothing imports `benchmarks`, and nothing here imports a server's internals except for a measurement.
"""
