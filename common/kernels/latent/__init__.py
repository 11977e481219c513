"""Latent attention: a vector for each token, read whole by decode steps, expanded to keys and values for prompts."""
