"""Operations in which models are written.

`base` declares the operations and `reference` defines their results. `torch_ops` runs anywhere, `cuda_ops` fast on a
GPU.
"""
