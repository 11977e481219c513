"""What workers, memory servers and the router share: frames, CUDA handles, and rules of thumb."""
