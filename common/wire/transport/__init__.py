"""How messages travel: sockets, names where they meet, secrets, and a worker's connection to the router."""
