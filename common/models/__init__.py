"""Model architectures, a file for each `model_type` of config.json.

Models know no kernels, because the caller hands over the ops.
"""
