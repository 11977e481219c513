"""What is measured, and how: the load generator, kernel and handoff benchmarks, results as rows.

Nothing imports `benchmarks`, and nothing here imports a server's internals except to measure them.
"""
