"""From the bytes of a request to tokens: on the event loop, in a thread, or in another process."""
