"""One architecture a file, named by `model_type` in config.json.

Models know no kernels: they call the ops handed to them.
"""
