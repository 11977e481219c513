"""Parts shared by the loops of several programs: start, settling and end of a process, and end of a request."""
