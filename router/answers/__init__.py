"""Responses: whole and streamed, in the shapes of each API."""
