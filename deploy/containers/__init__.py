"""Programs run by containers of the compose files."""
