"""A completion: state, attempts and phases, and the summary at its end."""
