"""Latent attention: a vector a token in the cache, read whole by decode steps and expanded to keys and values by prompts."""
