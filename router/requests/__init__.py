"""Checked requests, and the tables of fields allowed in a request's body."""
