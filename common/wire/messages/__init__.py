"""Messages between processes: fields, relations between fields, and frames."""
