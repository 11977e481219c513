"""Text and tokens: tokenizer, templates of chats, detokenizer, stop strings, log-probabilities."""
