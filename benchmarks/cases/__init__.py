"""Cases of `benchmarks.kernels`: operations of a decode step and kernels alone, with shapes, laws and bytes."""
