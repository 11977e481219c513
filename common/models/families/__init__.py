"""Model families: a module reads config.json of one `model_type` into a `DecoderConfig`."""
