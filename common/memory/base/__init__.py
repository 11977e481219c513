"""Parts shared by workers, memory servers and the router: frames, CUDA handles, rules of thumb."""
