"""Processes of a machine: placement, start, supervision and end."""
