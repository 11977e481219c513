"""A worker's device with a model and a pool of KV blocks, and limits on their memory and time."""
