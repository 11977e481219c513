"""The device of a worker: a model and a pool of KV blocks on it, and how much memory and time they may take."""
