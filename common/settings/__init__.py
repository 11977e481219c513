"""Options of all programs, and where their values come from."""
