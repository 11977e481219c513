"""Memory of a GPU or of this host, as a memory server allocates, shares and copies it."""
