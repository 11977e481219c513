"""Questions of operators to a running system: workers, readiness, and drains."""
