"""Text and tokens: tokenizer, chat templates, detokenizer, stop strings, log-probabilities."""
