"""Values inside messages, and the names by which processes know models, blocks and one another."""
