"""Values inside messages, and names of models, blocks and processes."""
