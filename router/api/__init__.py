"""HTTP endpoints: completions, the model, status, documentation, and the application around requests."""
