"""Files of a model: a directory in Hugging Face's layout, or a GGUF file. Needs no torch and no tokenizers."""
