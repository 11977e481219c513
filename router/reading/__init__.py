"""Reading of request bodies into tokens: on the event loop, in a thread, or in another process."""
