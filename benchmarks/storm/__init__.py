"""Workers are killed, drained, stopped and replaced under load, and no client may notice."""
