"""Models: sizes from config.json, weights from safetensors files, and the forward pass.

`families` names architectures; other code sees the protocols of `base`.
"""
