"""Options of all programs, and the sources of their values."""
