"""What operators ask a running system: who serves, whether it is ready, and that a worker drains."""
