"""Below the endpoints: connections and their limits, headers, keys, error bodies, unread answers."""
