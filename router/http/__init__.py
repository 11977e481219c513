"""HTTP below the endpoints: connections, limits, headers, API keys, error bodies, unread answers."""
