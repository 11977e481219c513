"""What all kernels share: bundles of tensors, checks of them, and idioms of launches."""
