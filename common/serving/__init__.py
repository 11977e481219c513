"""What the loops of several programs share: how a process starts, settles and ends, and when a request is over."""
