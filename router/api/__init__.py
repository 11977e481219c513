"""HTTP endpoints: completions, the model, status, documents, and what surrounds a request."""
