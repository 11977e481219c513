"""Reading of what a checkpoint says of its quantization: a reader for each `quant_method`. Needs no torch."""
