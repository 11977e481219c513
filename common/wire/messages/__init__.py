"""Every message between two processes, its rules, and its bytes."""
