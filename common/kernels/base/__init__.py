"""Code shared by all kernels: bundles of tensors, checks of tensors, and idioms of launches."""
