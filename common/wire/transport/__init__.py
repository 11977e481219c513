"""Transport of messages: sockets, endpoints, secrets, and a worker's connection to the router."""
