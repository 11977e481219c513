"""A front: a process that reads HTTP requests and writes texts, for a dispatcher in another process."""
