"""Steps on a device: inputs, launches, results, and loading of kernels."""
