"""What containers of the compose files run."""
