"""Choice of the workers for a request: live workers, cached prefixes, KV paths, and the cost of each pair."""
