"""The owner of every request's state: queue, attempts, deadlines, replays and end."""
