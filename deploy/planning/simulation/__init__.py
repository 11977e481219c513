"""A discrete-event simulation of a router, workers and GPUs."""
