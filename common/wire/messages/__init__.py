"""Messages between processes: declarations and frames."""
