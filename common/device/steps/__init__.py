"""Steps on a device: their inputs, launches and results, and the kernels that they need."""
