"""The operations a model is written in.

`base` says what they are, `reference` what they compute, `torch_ops` runs them anywhere, `cuda_ops` fast on a GPU.
"""
