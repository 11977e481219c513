"""Memory of a GPU or of the host: allocated, shared and copied by a memory server."""
