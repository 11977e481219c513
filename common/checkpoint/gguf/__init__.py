"""GGUF files: header, configuration and tokenizer from metadata. Tensors are told by place and type, and never read."""
