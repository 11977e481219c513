"""Tables of README.md and benchmarks/README.md, made from runs: cells, layout, and the rows of each table."""
