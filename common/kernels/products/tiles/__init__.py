"""Parts shared by kernels of products: tiles on their way through shared memory, and the end of a product."""
